from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lamella.kvtier import TierConfigError
from lamella.kvtier.config import DiskConfig, ExternalConfig, TiersConfig, parse_bytes, parse_tiers


@pytest.mark.parametrize(
    ("wanted", "config"),
    [
        ("ram=40GiB", TiersConfig(40 << 30)),
        ("ram=40GiB,disk=/path:200GiB", TiersConfig(40 << 30, DiskConfig(Path("/path"), 200 << 30))),
        (["ram=1GiB", "disk=/a:b:2GB"], TiersConfig(1 << 30, DiskConfig(Path("/a:b"), 2 * 10**9))),
        (
            " ram = 1GiB , policy=s3fifo,admission=reused",
            TiersConfig(1 << 30, policy="s3fifo", admission="reused"),
        ),
        (
            "ram=1GiB,disk=/d:1GiB,compress=zstd,store_dtype=fp8,tenant_share=0.25",
            TiersConfig(
                1 << 30, DiskConfig(Path("/d"), 1 << 30), tenant_share=0.25, compress="zstd", store_dtype="fp8"
            ),
        ),
        (
            ["ram=1GiB", 'external=a.b:C,{"url": "http://x,y", "deep": {"n": [1, 2]}}'],
            TiersConfig(
                1 << 30, externals=(ExternalConfig("a.b:C", {"url": "http://x,y", "deep": {"n": [1, 2]}}, "C"),)
            ),
        ),
        (
            'external=a.b:C, {"n": 1} , ram=1GiB,external=d:C',
            TiersConfig(1 << 30, externals=(ExternalConfig("a.b:C", {"n": 1}, "C"), ExternalConfig("d:C", {}, "C-2"))),
        ),
        (
            {
                "ram": 4096,
                "disk": {"folder": "/d", "size": "1MiB"},
                "external": [{"class": "a:B", "name": "shop"}, "c:D"],
            },
            TiersConfig(
                4096,
                DiskConfig(Path("/d"), 1 << 20),
                (ExternalConfig("a:B", {}, "shop"), ExternalConfig("c:D", {}, "D")),
            ),
        ),
        ([{"ram": "1GiB"}, "disk=/d:1GiB"], TiersConfig(1 << 30, DiskConfig(Path("/d"), 1 << 30))),
        ([], TiersConfig()),
        ("", TiersConfig()),
    ],
)
def test_texts_and_values_say_the_same(wanted: Any, config: TiersConfig) -> None:
    assert parse_tiers(wanted) == config


def test_a_folder_of_the_user_is_found() -> None:
    disk = parse_tiers("ram=1GiB,disk=~/kv:1GiB").disk
    assert disk is not None
    assert disk.folder == Path.home() / "kv"


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("1KiB", 1024), ("1.5 gib", 3 << 29), ("2TB", 2 * 10**12), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "") == size


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        ("ram", ["'ram'", "is not KEY=VALUE", "ram, disk, external"]),
        ("rum=4GiB", ["'rum=4GiB'", "no key 'rum'", "keys are"]),
        ({"rum": 1}, ["no key 'rum'"]),
        ("ram=lots", ["'ram=lots'", "'lots'", "40GiB"]),
        ("ram=4GoB", ["'4GoB'"]),
        ("ram=0", ["is nothing", "leave the tier out"]),
        ("ram=1GiB,ram=2GiB", ["ram is given twice"]),
        (["ram=1GiB", {"ram": 5}], ["ram=5", "given twice"]),
        ("disk=/path:1GiB", ["disk without ram", "add ram=SIZE"]),
        ("policy=lru", ["policy without ram"]),
        ("external=a:B", ["external without ram"]),
        ("ram=1GiB,disk=/path", ["'/path'", "has no size", "disk=FOLDER:SIZE"]),
        ("ram=1GiB,disk=:1GiB", ["has no folder"]),
        ("ram=1GiB,disk=/path:big", ["'big'"]),
        ({"ram": 1 << 30, "disk": {"path": "/d"}}, ["disk has the keys path", "folder and size"]),
        ("ram=1GiB,policy=arc", ["policy 'arc'", "lru, s3fifo"]),
        ("ram=1GiB,tenant_share=2", ["tenant_share '2' is no share", "above 0, at most 1"]),
        ({"ram": 1 << 30, "tenant_share": None}, ["tenant_share None is no share"]),
        ("ram=1GiB,admission=some", ["admission 'some'", "all, reused"]),
        ("ram=1GiB,compress=zstd", ["compress without disk"]),
        ("ram=1GiB,store_dtype=fp8", ["store_dtype without disk"]),
        ("ram=1GiB,external=a.b", ["'a.b' names no class", "package.module:Class"]),
        ("ram=1GiB,external=a:B,{url: 1}", ["options behind a:B are no JSON", "character"]),
        ('ram=1GiB,external=a:B,{"n": 1} x', ["'x' follows the options"]),
        ({"ram": 1, "external": {"class": "a:B", "options": [1]}}, ["options of a:B are [1]"]),
        ({"ram": 1, "external": {"path": "a:B"}}, ["is not understood"]),
        ({"ram": 1, "external": [{"class": "a:B", "name": "x"}, {"class": "a:C", "name": "x"}]}, ["'x' is taken"]),
        ([4], ["4: tiers are described by"]),
    ],
)
def test_what_is_wrong_is_named_with_a_remedy(wanted: Any, parts: list[str]) -> None:
    with pytest.raises(TierConfigError) as caught:
        parse_tiers(wanted)
    for part in parts:
        assert part in str(caught.value)
