from pathlib import Path

import pytest

from batchspec.config import RouteConfig
from batchspec.errors import UsageError
from batchspec.profile.policy import StaticPolicy, static_policy
from batchspec.types import Method, Route

ROUTES = """
["*"]
method = "target-only"

[extraction]
method = "prompt-lookup"
num_speculative_tokens = 8
min_match_tokens = 1

["code/p256-1024/o64-256"]
method = "prompt_lookup"

["code"]
method = "prompt-lookup"
num_speculative_tokens = 0

["a/b"]
method = "prompt-lookup"
num_speculative_tokens = 1
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "routes.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("request_class", "method", "num_speculative_tokens", "min_match_tokens"),
    [
        ("extraction", Method.PROMPT_LOOKUP, 8, 1),
        ("extraction/p16-64/o16-64", Method.PROMPT_LOOKUP, 8, 1),
        ("code", Method.TARGET_ONLY, 0, 2),
        ("code/p256-1024/o64-256", Method.PROMPT_LOOKUP, 4, 2),
        ("code/p64-256/o64-256", Method.TARGET_ONLY, 0, 2),
        ("a/b", Method.PROMPT_LOOKUP, 1, 2),
        ("a/b/p1-4/o1-4", Method.PROMPT_LOOKUP, 1, 2),
        ("a", Method.TARGET_ONLY, 0, 2),
        ("something else", Method.TARGET_ONLY, 0, 2),
        (None, Method.TARGET_ONLY, 0, 2),
    ],
)
def test_a_class_takes_the_route_of_its_cell_then_label_then_star(
    tmp_path: Path, request_class: str | None, method: Method, num_speculative_tokens: int, min_match_tokens: int
) -> None:
    policy = static_policy(RouteConfig(Method.PROMPT_LOOKUP, routes_file=write(tmp_path, ROUTES)))
    route = policy.route(request_class, 32)
    assert (route.method, route.num_speculative_tokens, route.min_match_tokens) == (
        method,
        num_speculative_tokens,
        min_match_tokens,
    )


def test_without_a_routes_file_the_options_hold_for_every_class() -> None:
    policy = static_policy(RouteConfig(Method.PROMPT_LOOKUP, num_speculative_tokens=6, min_match_tokens=3))
    assert policy.route("any", 1) == policy.route(None, 64) == Route(Method.PROMPT_LOOKUP, 6, "--method", 3)


def test_a_class_that_the_file_leaves_out_takes_the_options_route(tmp_path: Path) -> None:
    policy = static_policy(RouteConfig(Method.PROMPT_LOOKUP, routes_file=write(tmp_path, "[a]\nmethod='target-only'")))
    assert policy.route("a", 1).method is Method.TARGET_ONLY
    assert policy.route("b", 1).method is Method.PROMPT_LOOKUP


def test_rows_without_a_class_are_the_class_default(tmp_path: Path) -> None:
    policy = static_policy(RouteConfig(routes_file=write(tmp_path, "[default]\nmethod = 'prompt-lookup'")))
    assert policy.route(None, 1).method is Method.PROMPT_LOOKUP


def test_the_reason_says_which_setting_decided(tmp_path: Path) -> None:
    policy = static_policy(RouteConfig(routes_file=write(tmp_path, "[a]\nmethod = 'prompt-lookup'")))
    assert policy.route("a", 1).reason == "routes file, class a"
    assert policy.route("b", 1).reason == "--method"


@pytest.mark.parametrize("method", [Method.TARGET_ONLY, Method.PROMPT_LOOKUP])
def test_c09_no_speculative_tokens_is_target_only(method: Method) -> None:
    route = static_policy(RouteConfig(method, num_speculative_tokens=0)).route("a", 1)
    assert (route.method, route.num_speculative_tokens) == (Method.TARGET_ONLY, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RouteConfig(Method.PROMPT_LOOKUP, num_speculative_tokens=-1),
            "--num-speculative-tokens must be a whole number from 0 to 16, got -1",
        ),
        (
            RouteConfig(Method.PROMPT_LOOKUP, num_speculative_tokens=10000),
            "--num-speculative-tokens must be a whole number from 0 to 16, got 10000",
        ),
        (
            RouteConfig(Method.PROMPT_LOOKUP, min_match_tokens=0),
            "--min-match-tokens must be a whole number from 1 to 8, got 0",
        ),
        (
            RouteConfig(Method.DRAFT_MODEL),
            "--method draft-model needs a draft model: name one with --draft-model",
        ),
        (
            RouteConfig(Method.LOOKUP_THEN_DRAFT),
            "--method lookup-then-draft needs a draft model: name one with --draft-model",
        ),
    ],
)
def test_c09_a_bad_option_is_one_line_with_its_limits(config: RouteConfig, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        static_policy(config)
    assert str(caught.value) == message
    assert caught.value.exit_code == 2


def test_a_draft_method_is_routed_where_there_is_a_draft_model() -> None:
    assert static_policy(RouteConfig(Method.DRAFT_MODEL), draft_model="d").route(None, 1).method is Method.DRAFT_MODEL


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ("[a]\nnum_speculative_tokens = 2", "method must be one of target-only, prompt-lookup"),
        ("[a]\nmethod = 'ngram'", "method must be one of target-only, prompt-lookup"),
        ("[a]\nmethod = 3", "method must be one of target-only, prompt-lookup"),
        ("[a]\nmethod = 'prompt-lookup'\nk = 4", "unknown key 'k'; the keys are method, num_speculative_tokens"),
        (
            "[a]\nmethod = 'prompt-lookup'\nnum_speculative_tokens = 17",
            "num_speculative_tokens must be a whole number from 0 to 16, got 17",
        ),
        (
            "[a]\nmethod = 'prompt-lookup'\nnum_speculative_tokens = true",
            "num_speculative_tokens must be a whole number from 0 to 16, got True",
        ),
        (
            "[a]\nmethod = 'prompt-lookup'\nmin_match_tokens = 2.5",
            "min_match_tokens must be a whole number from 1 to 8, got 2.5",
        ),
        ("[a]\nmethod = 'draft-model'", "method draft-model needs a draft model"),
        ("a = 'prompt-lookup'", "must be a table with the keys method, num_speculative_tokens, min_match_tokens"),
    ],
)
def test_c09_a_bad_route_names_file_class_key_and_limits(tmp_path: Path, table: str, problem: str) -> None:
    path = write(tmp_path, table)
    with pytest.raises(UsageError) as caught:
        static_policy(RouteConfig(routes_file=path))
    assert str(caught.value).startswith(f"{path}, class 'a': {problem}")
    assert "\n" not in str(caught.value)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    path = write(tmp_path, "[a]\nmethod = 'x'\nk = 1\n[b]\nmethod = 'target-only'\nmin_match_tokens = 0")
    with pytest.raises(UsageError) as caught:
        static_policy(RouteConfig(num_speculative_tokens=99, routes_file=path))
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("--num-speculative-tokens")
    assert all("class 'a'" in line for line in lines[1:3])
    assert "class 'b'" in lines[3]


@pytest.mark.parametrize("content", [b"[a\nmethod", b"a = 1\na = 2", b"\xff\xfe"])
def test_a_routes_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "routes.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"--routes .*routes\.toml: not a TOML file: "):
        static_policy(RouteConfig(routes_file=str(path)))


def test_a_routes_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--routes .*nowhere\.toml: cannot read the file: No such file"):
        static_policy(RouteConfig(routes_file=str(tmp_path / "nowhere.toml")))


def test_the_policy_is_a_plain_record() -> None:
    route = Route(Method.PROMPT_LOOKUP, 2)
    assert StaticPolicy(Route(Method.TARGET_ONLY), {"a": route}).route("a", 7) is route
