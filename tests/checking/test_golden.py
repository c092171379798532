"""Golden files: small, complete, and safe to read."""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from pathlib import Path

import pytest

from castwise.checking import Golden
from castwise.checking._recorder import ProbeKey
from castwise.checking._sketches import KEPT, Sketch


def golden_with(modules: int, params: int, steps: int = 3) -> Golden:
    """A golden whose numbers compress as badly as real ones."""
    golden = Golden(steps, "float32", {"torch": "2.13.0", "threads": 2, "commit": None})
    golden.settings = [[{"optimizer": "SGD", "group": 0, "values": {"lr": 0.1 / 3}, "params": ["a"]}]] * steps
    golden.digests, golden.losses, golden.local = ["00ff"] * steps, ["ee"] * steps, {"blocks.0": 1.25e-7}
    keys = [
        ProbeKey(step, kind, f"blocks.{number}.layer", 0, 0)
        for step in range(steps)
        for kind, count in (("in", modules), ("forward", modules), ("gradient", params), ("backward", modules))
        for number in range(count)
    ]
    for i, key in enumerate(keys):
        values = [math.sin(i * 12.9898 + j * 78.233) * 43758.5453 for j in range(KEPT + 2)]
        golden.probes[key] = Sketch(tuple(values[:KEPT]), abs(values[-2]), values[-1])
        if key.kind == "in":
            golden.callers[key] = None if key.name == "blocks.0.layer" else "blocks.0.layer"
        if key.kind == "gradient":
            golden.errors[key], golden.spreads[key] = 1e-6, 2e-6
    golden.left_out = {keys[modules * 2], keys[0]}
    golden.skipped = 1
    return golden


def test_everything_that_is_saved_is_read_back(tmp_path: Path) -> None:
    golden = golden_with(3, 4)
    golden.save(tmp_path / "g.cwcheck")
    found = Golden.load(tmp_path / "g.cwcheck")
    for name in ("steps", "dtype", "about", "settings", "digests", "losses", "callers", "local", "left_out", "skipped"):
        assert getattr(found, name) == getattr(golden, name), name
    assert [*found.probes] == [*golden.probes]
    assert found.errors == pytest.approx(golden.errors)
    assert found.spreads == pytest.approx(golden.spreads)
    for key, sketch in golden.probes.items():
        kept = KEPT if key.kind == "gradient" else KEPT // 2
        expected = (*sketch.folded(kept), sketch.norm, sketch.sum)
        read = found.probes[key]
        assert (*read.buckets, read.norm, read.sum) == pytest.approx(expected, rel=1e-11, abs=1e-7)


def test_a_file_of_3000_probes_is_below_200_kb(tmp_path: Path) -> None:
    golden = golden_with(modules=280, params=160)
    assert len(golden.probes) == 3000
    golden.save(tmp_path / "g.cwcheck")
    assert (tmp_path / "g.cwcheck").stat().st_size < 200_000
    assert len(Golden.load(tmp_path / "g.cwcheck").probes) == 3000


def test_a_larger_program_keeps_what_decides_and_drops_middle_steps_of_modules(tmp_path: Path) -> None:
    golden = golden_with(modules=300, params=160)
    golden.save(tmp_path / "g.cwcheck")
    found = Golden.load(tmp_path / "g.cwcheck").probes
    assert {key for key in golden.probes if key.kind == "gradient"} <= found.keys()
    assert {key.step for key in found if key.kind == "forward"} == {0, 2}
    assert len(found) <= 3000


def test_the_same_golden_is_the_same_file(tmp_path: Path) -> None:
    golden_with(3, 4).save(tmp_path / "a")
    golden_with(3, 4).save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def zipped(**parts: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name.replace("_", "."), content)
    return file.getvalue()


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.zip"
    path.write_bytes(before := zipped(notes_txt=b"mine"))
    with pytest.raises(FileExistsError, match="it exists and is not a golden file"):
        golden_with(1, 1).save(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a zip",
        pickle.dumps(print),
        zipped(notes_txt=b"mine"),
        zipped(header_json=b"[]", values_bin=b""),
        zipped(header_json=b"{", values_bin=b""),
        zipped(header_json=b'{"format": 1}', values_bin=b""),
    ],
)
def test_what_is_no_golden_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(content)
    with pytest.raises(ValueError, match="is not a golden file"):
        Golden.load(tmp_path / "g")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("settings", [[{}]] * 3, "settings must have optimizer, group, values and params, got {}"),
        ("settings", [5], "it has settings of 1 steps, and must have them of 3"),
        ("settings", [], "it has settings of 0 steps, and must have them of 3"),
        ("settings", [[]] * 3, "a step has no settings of an optimizer"),
        ("digests", ["00"] * 2, "it has digests of 2 steps, and must have them of 3"),
        ("losses", ["00"], "it has losses of 1 steps, and must have them of 3"),
        ("digests", [None] * 3, "digests and losses must be hashes"),
        ("about", {"ranks": "two"}, "ranks must be an integer of at least 1, got 'two'"),
        ("about", [], "about must be of type dict, got []"),
        ("steps", -1, "steps must be an integer of at least 0, got -1"),
        ("steps", math.inf, "steps must be of type int, got inf"),
        ("dtype", "float8", "dtype must be one of float32, bfloat16, float16, unknown, got 'float8'"),
        ("local", {"blocks.0": math.nan}, "the error of blocks.0 must be a number >= 0, got nan"),
        ("names", [], "a position must be less than 0, got 0"),
        ("left_out", [-1], "a position must be an integer of at least 0, got -1"),
        ("probes", [[0, "weight", 0, 0, 0]], "a probe is of kind 'weight'; known are param, in, "),
        ("probes", [[0, "update", 0, 0, 0]] * 2, "it has a probe twice"),
        ("probes", [], "its values have 528 bytes, and its probes need 0"),
    ],
)
def test_a_header_with_other_contents_is_refused(key: str, value: object, said: str, tmp_path: Path) -> None:
    golden_with(1, 1).save(tmp_path / "g")
    with zipfile.ZipFile(tmp_path / "g") as archive:
        header, values = json.loads(archive.read("header.json")), archive.read("values.bin")
    changed = {**header, "left_out": [], key: value}
    (tmp_path / "g").write_bytes(zipped(header_json=json.dumps(changed).encode(), values_bin=values))
    with pytest.raises(ValueError, match=r"is not a golden file.*; give another file, or record again") as raised:
        Golden.load(tmp_path / "g")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"norm": math.nan}, "the value of gradient blocks.0.layer in step 1 is nan"),
        ({"norm": -1.0}, "the value of gradient blocks.0.layer in step 1 is damaged"),
        ({"sum": math.nan}, "the value of gradient blocks.0.layer in step 1 is damaged"),
    ],
)
def test_values_that_no_recording_has_are_refused(changed: dict[str, float], said: str, tmp_path: Path) -> None:
    golden = golden_with(1, 1)
    key = ProbeKey(0, "gradient", "blocks.0.layer")
    golden.left_out, golden.probes[key] = set(), golden.probes[key]._replace(**changed)
    golden.save(tmp_path / "g")
    with pytest.raises(ValueError, match=said):
        Golden.load(tmp_path / "g")


def test_older_files_have_no_losses(tmp_path: Path) -> None:
    golden_with(1, 1).save(tmp_path / "g")
    with zipfile.ZipFile(tmp_path / "g") as archive:
        header, values = json.loads(archive.read("header.json")), archive.read("values.bin")
    del header["losses"]
    (tmp_path / "g").write_bytes(zipped(header_json=json.dumps(header).encode(), values_bin=values))
    assert Golden.load(tmp_path / "g").losses == []


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    golden_with(1, 1).save(tmp_path / "g")
    with zipfile.ZipFile(tmp_path / "g") as archive:
        header = archive.read("header.json")
    (tmp_path / "g").write_bytes(zipped(header_json=header, values_bin=bytes(10)))
    with pytest.raises(ValueError, match="is not a golden file"):
        Golden.load(tmp_path / "g")


def test_a_file_of_a_newer_format_says_so(tmp_path: Path) -> None:
    golden_with(1, 1).save(tmp_path / "g")
    with zipfile.ZipFile(tmp_path / "g") as archive:
        header, values = json.loads(archive.read("header.json")), archive.read("values.bin")
    (tmp_path / "g").write_bytes(zipped(header_json=json.dumps({**header, "format": 2}).encode(), values_bin=values))
    with pytest.raises(ValueError, match="has format 2, which needs a newer version of castwise"):
        Golden.load(tmp_path / "g")
