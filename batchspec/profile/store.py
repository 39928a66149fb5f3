"""A profile as one JSON file, strict and diffable; and what it takes to trust one. pydantic reads, nothing guesses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from batchspec.errors import MismatchError, UsageError
from batchspec.profile.records import PROFILE_VERSION, Profile
from batchspec.system import write_whole


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile, whole or not at all."""
    text = json.dumps(asdict(profile), indent=1, sort_keys=True, allow_nan=False)
    try:
        write_whole(path, text + "\n")
    except OSError as error:
        raise UsageError(f"cannot write the profile {path}: {error.strerror}") from error


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises UsageError naming what is wrong with the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--profile {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise UsageError(f"--profile {path}: not a profile: the file is not text") from None
    return parse_profile(text, str(path))


def parse_profile(text: str, path: str) -> Profile:
    """A profile from its JSON; `path` is named where it is none."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

    adapter = TypeAdapter(with_config(ConfigDict(extra="forbid"))(Profile))
    try:
        profile = adapter.validate_json(text)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise UsageError(f"--profile {path}: not a profile: {problems}") from None
    if profile.profile_version != PROFILE_VERSION:
        raise UsageError(
            f"--profile {path}: version {profile.profile_version}, this batchspec reads {PROFILE_VERSION}; make it "
            "again with `batchspec profile`"
        )
    return profile


def fingerprint_differences(profile: Profile, now: Mapping[str, str]) -> list[str]:
    """What the profile was measured with and this run is not, one line per item. A GPU that this machine cannot name,
    since it is another's, is taken to be the profile's."""
    names = profile.fingerprint.keys() | now.keys()
    if now.get("device_type") == "cuda" and profile.fingerprint.get("device_type", "cpu") != "cpu":
        names -= {"device_type"}
    return [
        f"{name}: profile {profile.fingerprint.get(name, 'none')}, run {now.get(name, 'none')}"
        for name in sorted(names)
        if profile.fingerprint.get(name) != now.get(name)
    ]


def refuse_stale_profile(path: str, profile: Profile, now: Mapping[str, str]) -> None:
    """Raise MismatchError naming every difference. A profile of something else is never trusted."""
    found = fingerprint_differences(profile, now)
    if found:
        raise MismatchError(
            f"--profile {path} was measured with something else: {'; '.join(found)}. Make it again with `batchspec "
            "profile`, or run target-only with --profile none"
        )
