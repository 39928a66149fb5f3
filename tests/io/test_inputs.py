import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_tables import read, resolve, unchecked_strings, write

from batchspec.errors import InputError, MissingDependencyError


def prompts(count: int = 2, start: int = 0) -> dict[str, list[str]]:
    return {"prompt": [f"prompt {i}" for i in range(start, start + count)]}


def test_files_keep_their_order_and_number_their_rows(tmp_path: Path) -> None:
    b = write(tmp_path / "b.parquet", prompts(3))
    a = write(tmp_path / "a.parquet", prompts(2, start=3))
    inputs = resolve(b, a)
    assert [(f.name, f.num_rows, f.first_row_index) for f in inputs.files] == [(str(b), 3, 0), (str(a), 2, 3)]
    assert inputs.num_rows == 5
    assert read(inputs)["prompt"].to_pylist() == prompts(5)["prompt"]
    assert inputs.files[0].size_bytes == b.stat().st_size


def test_a_relative_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "in.parquet", prompts())
    monkeypatch.chdir(tmp_path)
    assert resolve("in.parquet").files[0].path == str(tmp_path / "in.parquet")


def test_a_directory_is_read_recursively_without_hidden_names(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a.parquet", "b/1"):
        write(tmp_path / "in" / name, prompts())
    for name in ("_SUCCESS", ".part.crc", "_batchspec/journal", ".tmp/x.parquet", "b/_metadata"):
        hidden = tmp_path / "in" / name
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_text("not Parquet")
    names = [f.name.removeprefix(f"{tmp_path}/in/") for f in resolve(tmp_path / "in").files]
    assert names == ["a.parquet", "b/1", "b/2.parquet"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.parquet", ["a.parquet", "b.parquet"]),
        ("**/*.parquet", ["a.parquet", "b.parquet", "sub/c.parquet"]),
        ("[ab].parquet", ["a.parquet", "b.parquet"]),
        ("s*", ["sub/c.parquet"]),
        ("**", ["a.parquet", "b.parquet", "sub/c.parquet"]),
    ],
)
def test_globs(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("a.parquet", "b.parquet", "sub/c.parquet", "_hidden.parquet"):
        write(tmp_path / name, prompts())
    assert [f.name.removeprefix(f"{tmp_path}/") for f in resolve(tmp_path / pattern).files] == expected


@pytest.mark.parametrize(
    "name", ["a[1]*?.parquet", "spaced name.parquet", "größe=ü.parquet", "no_ending", "a#b%20.parquet"]
)
def test_an_existing_path_is_taken_as_it_is_whatever_signs_it_holds(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, prompts())
    assert [f.name for f in resolve(tmp_path / name).files] == [str(tmp_path / name)]
    assert [f.name for f in resolve(tmp_path).files] == [str(tmp_path / name)]


def test_a_name_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x", prompts()).rename(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.parquet"))
    with pytest.raises(InputError, match=r"caf\\udce9.parquet is not valid Unicode; rename"):
        resolve(tmp_path)


def test_an_address_of_a_local_file_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", prompts())
    inputs = resolve(f"file://{path}")
    assert inputs.files[0].name == str(path)
    assert read(inputs).num_rows == 2


def test_a_remote_file_system_is_read_through_fsspec() -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    with memory.open("/bucket/class=qa/part.parquet", "wb") as file:
        pq.write_table(pa.table(prompts()), file)
    inputs = resolve("memory://bucket")
    assert [f.name for f in inputs.files] == ["memory:///bucket/class=qa/part.parquet"]
    assert read(inputs).to_pydict() == {**prompts(), "class": ["qa", "qa"]}
    assert resolve("memory://bucket/*/part.parquet").num_rows == 2


def test_an_unknown_protocol_and_a_missing_library_are_usage_errors() -> None:
    with pytest.raises(InputError, match="nosuch"):
        resolve("nosuch://bucket/x.parquet")
    with pytest.raises(MissingDependencyError, match="dropbox"):
        resolve("dropbox://user:secret@host/x.parquet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{tmp}/missing.parquet", "no file or directory {tmp}/missing.parquet"),
        ("{tmp}/*.orc", r"no file or directory {tmp}/\*.orc"),
        ("org/name", "hf://org/name"),
        ("{tmp}/empty", "empty holds no file"),
        ("{tmp}/text.parquet", "text.parquet is not a Parquet file, or is damaged"),
        ("{tmp}/tiny.parquet", "tiny.parquet is not a Parquet file, or is damaged: it has 3 bytes"),
        ("{tmp}/cut.parquet", "cut.parquet is not a Parquet file, or is damaged"),
        ("{tmp}/footer.parquet", "footer.parquet is not a Parquet file, or is damaged"),
        ("{tmp}/locked.parquet", "locked.parquet is not a Parquet file, or is damaged: its footer is encrypted"),
    ],
)
def test_what_is_missing_or_damaged_is_named(tmp_path: Path, text: str, message: str) -> None:
    whole = write(tmp_path / "in/whole.parquet", prompts(100)).read_bytes()
    (tmp_path / "empty/.git").mkdir(parents=True)
    (tmp_path / "text.parquet").write_text("prompt\nnot Parquet at all")
    (tmp_path / "tiny.parquet").write_bytes(b"PAR")
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "footer.parquet").write_bytes(whole[:-60] + bytes(52) + whole[-8:])
    (tmp_path / "locked.parquet").write_bytes(whole[:-4] + b"PARE")
    with pytest.raises(InputError, match=message.format(tmp=tmp_path)) as raised:
        resolve(text.format(tmp=tmp_path))
    assert raised.value.exit_code == 2


def test_any_damage_to_the_footer_is_an_input_error_or_harmless(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", prompts(10)).read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for position in range(start, len(whole)):
        for flip in (0xFF, 0x01, 0x80):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            path = tmp_path / "damaged.parquet"
            path.write_bytes(damaged)
            try:
                resolve(path)
            except InputError:
                refused += 1
    assert refused > 100


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet", prompts())
    with pytest.raises(InputError, match="given more than once"):
        resolve(tmp_path, path)


def test_no_input_at_all() -> None:
    with pytest.raises(InputError, match="no input"):
        resolve()


def test_limit_keeps_the_first_rows(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 3), ("c", 6)):
        write(tmp_path / f"{name}.parquet", prompts(3, start))
    whole = resolve(tmp_path)
    limited = resolve(tmp_path, limit=4)
    assert [f.num_rows for f in limited.files] == [3, 1]
    assert limited.files[1].uncompressed_bytes == whole.files[1].uncompressed_bytes // 3
    assert read(limited)["prompt"].to_pylist() == prompts(4)["prompt"]
    assert limited.content_hash != whole.content_hash
    assert resolve(tmp_path, limit=100) == whole
    assert resolve(tmp_path, limit=0).num_rows == 0


def test_the_content_hash_follows_content_not_place(tmp_path: Path) -> None:
    first = resolve(write(tmp_path / "a.parquet", prompts())).content_hash
    assert resolve(write(tmp_path / "moved/b.parquet", prompts())).content_hash == first
    assert resolve(write(tmp_path / "a.parquet", {"prompt": ["prompt 0", "prompt 2"]})).content_hash != first
    assert resolve(write(tmp_path / "a.parquet", {**prompts(), "id": [1, 2]})).content_hash != first
    write(tmp_path / "parts/class=qa/a.parquet", prompts())
    assert resolve(tmp_path / "parts").content_hash != first


def test_p05_hive_directories_become_text_columns(tmp_path: Path) -> None:
    write(tmp_path / "in/class=code/a.parquet", prompts(1))
    write(tmp_path / "in/class=007/b.parquet", prompts(2))
    write(tmp_path / "in/class=a%2Fb/lang=de/c.parquet", prompts(1))
    write(tmp_path / "in/class=__HIVE_DEFAULT_PARTITION__/d.parquet", prompts(1))
    inputs = resolve(tmp_path / "in")
    assert inputs.schema.field("class").type == pa.string()
    table = read(inputs)
    assert table["class"].to_pylist() == ["007", "007", None, "a/b", "code"]
    assert table["lang"].to_pylist() == [None, None, None, "de", None]


def test_p05_a_file_given_by_name_or_glob_gets_no_partition_column(tmp_path: Path) -> None:
    path = write(tmp_path / "in/class=code/a.parquet", prompts(1))
    for text in (path, path.parent, tmp_path / "in/class=*/a.parquet", tmp_path / "in/*/*.parquet"):
        assert resolve(text).schema.names == ["prompt"]


def test_p05_a_clash_of_directory_and_file_column_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "in/class=code/a.parquet", {**prompts(1), "class": ["qa"]})
    with pytest.raises(InputError, match=rf"{path} has the column 'class' twice: inside and in a dir"):
        resolve(tmp_path / "in")
    write(tmp_path / "twice/k=1/k=2/a.parquet", prompts(1))
    with pytest.raises(InputError, match="'k'"):
        resolve(tmp_path / "twice")


def test_p06_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "in.parquet")
    with pytest.raises(InputError, match=r"in.parquet has more than one column named 'prompt'"):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("Prompt", "column 'Prompt' differs from 'prompt' only by case"),
        ("Request_ID", "column 'Request_ID' differs from 'request_id' only by case"),
        ("SEED", "column 'SEED' differs from 'seed' only by case"),
    ],
)
def test_p06_names_that_differ_by_case_are_refused(tmp_path: Path, extra: str, message: str) -> None:
    write(tmp_path / "in.parquet", {**prompts(1), extra: ["1"]})
    with pytest.raises(InputError, match=message):
        resolve(tmp_path)


def test_p06_case_does_not_matter_between_columns_that_nobody_uses(tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", {**prompts(1), "Note": ["x"], "note": ["y"]})
    assert resolve(tmp_path).schema.names == ["prompt", "Note", "note"]


@pytest.mark.parametrize(
    ("columns", "config", "message"),
    [
        ({"text": ["a"]}, {}, "neither a column 'prompt' nor 'messages'.*--prompt-column.*columns are: text$"),
        ({"prompt": ["a"]}, {"prompt_column": "question"}, "no column 'question'.*--prompt-column.*are: prompt$"),
        ({"prompt": ["a"]}, {"request_id_column": "uid"}, "no column 'uid' .--request-id-column"),
        ({"prompt": [1]}, {}, "column 'prompt' is int64, but must be text"),
        ({"prompt": [["a"]]}, {}, "column 'prompt' is list<.*string>, but must be text"),
        ({"messages": [{"role": "user"}]}, {}, "column 'messages' is struct<.*>, but must be a list"),
        ({"messages": [["hello"]]}, {}, "'messages' is list<.*string>, but must be a list of structs"),
        (
            {"messages": [[{"role": "user"}]]},
            {},
            "'messages' is .*, but must be a list of structs with role and content",
        ),
        ({"prompt": ["a"], "temperature": ["0.5"]}, {}, "column 'temperature' is string, but must be a number"),
        ({"prompt": ["a"], "top_k": [True]}, {}, "column 'top_k' is bool, but must be a number"),
        ({"prompt": ["a"], "stop": [1]}, {}, "column 'stop' is int64, but must be text or a list of text"),
        ({"prompt": ["a"], "logit_bias": [[1]]}, {}, "column 'logit_bias' is list<.*>, but must be a map"),
        ({"prompt": [1], "seed": ["x"]}, {}, "column 'prompt' is int64.*; column 'seed' is string"),
    ],
)
def test_columns_that_do_not_fit_are_named_with_what_is_wanted(
    tmp_path: Path, columns: dict[str, list[object]], config: dict[str, str], message: str
) -> None:
    write(tmp_path / "in.parquet", columns)
    with pytest.raises(InputError, match=message):
        resolve(tmp_path, **config)


def test_columns_are_renameable(tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", {"q": ["a"], "uid": [1], "topic": ["x"]})
    inputs = resolve(tmp_path, prompt_column="q", request_id_column="uid", request_class_column="topic")
    assert inputs.num_rows == 1


def test_files_that_lack_a_column_are_null_there(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"prompt": ["a"], "id": pa.array([1], pa.int64())})
    write(tmp_path / "2.parquet", {"extra": [{"x": 1.5}], "prompt": ["b"]})
    write(tmp_path / "3.parquet", {"prompt": pa.nulls(1), "id": pa.nulls(1), "late": ["z"]})
    inputs = resolve(tmp_path)
    assert inputs.schema == pa.schema(
        {"prompt": pa.string(), "id": pa.int64(), "extra": pa.struct({"x": pa.float64()}), "late": pa.string()}
    )
    assert read(inputs).to_pydict() == {
        "prompt": ["a", "b", None],
        "id": [1, None, None],
        "extra": [None, {"x": 1.5}, None],
        "late": [None, None, "z"],
    }


def test_a_column_that_one_file_lacks_may_be_null_in_the_whole(tmp_path: Path) -> None:
    required = pa.schema([pa.field("prompt", pa.string(), nullable=False), pa.field("n", pa.int64(), nullable=False)])
    pq.write_table(pa.table({"prompt": ["a"], "n": [1]}, schema=required), tmp_path / "1.parquet")
    assert not resolve(tmp_path).schema.field("n").nullable
    pq.write_table(pa.table({"prompt": ["b"]}, schema=pa.schema([required.field("prompt")])), tmp_path / "2.parquet")
    schema = resolve(tmp_path).schema
    assert (schema.field("prompt").nullable, schema.field("n").nullable) == (False, True)


def test_a_type_conflict_names_both_files(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"prompt": ["a"], "id": pa.nulls(1)})
    write(tmp_path / "1.parquet", {"prompt": ["a"], "id": [1]})
    write(tmp_path / "2.parquet", {"prompt": ["b"], "id": ["x"]})
    message = f"column 'id' is int64 in {tmp_path}/1.parquet but string in {tmp_path}/2.parquet"
    with pytest.raises(InputError, match=message):
        resolve(tmp_path)


def test_the_same_type_in_two_encodings_is_no_conflict(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "a"}]]
    large = pa.large_list(pa.struct({"role": pa.large_string(), "content": pa.dictionary(pa.int8(), pa.string())}))
    write(tmp_path / "1.parquet", {"messages": messages, "tag": unchecked_strings([b"caf\xe9"])})
    write(
        tmp_path / "2.parquet",
        {"messages": pa.array(messages).cast(large), "tag": pa.array(["b"]).dictionary_encode()},
    )
    write(tmp_path / "3.parquet", {"messages": messages, "tag": pa.array(["c"], pa.large_string())})
    inputs = resolve(tmp_path)
    assert inputs.schema.field("tag").type == pa.string()
    table = read(inputs)
    assert table["messages"].to_pylist() == messages * 3
    assert table["tag"].cast(pa.binary()).to_pylist() == [b"caf\xe9", b"b", b"c"]


def test_p13_empty_files_have_a_schema_and_no_rows(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"prompt": pa.array([], pa.string())})
    inputs = resolve(tmp_path)
    assert (inputs.num_rows, inputs.schema.names) == (0, ["prompt"])
    assert read(inputs).num_rows == 0
    write(tmp_path / "2.parquet", prompts(2))
    write(tmp_path / "3.parquet", {"prompt": pa.array([], pa.string())})
    assert read(resolve(tmp_path))["prompt"].to_pylist() == prompts(2)["prompt"]
