"""What `trace` returns."""

from __future__ import annotations

from castwise.tracing import Cast, Op, Trace

OPS = (Op("aten.mm", "bfloat16", "bfloat16", 12, 3), Op("aten.relu", "float32", "float32", 1, 0))
CASTS = (
    Cast("0", "forward", "0.weight", "float32", "bfloat16", "", 2, 1200),
    Cast("", "forward", "activation", "float32", "bfloat16", "cast before", 3, 30),
    Cast("0", "forward", "gradient", "float32", "bfloat16", "", 1, 7),
    Cast("0", "backward", "0.weight", "bfloat16", "float32", "", 1, 600),
)


def test_a_trace_as_text() -> None:
    assert (
        str(Trace(OPS, CASTS))
        == """\
module  phase     cast of     dtypes               count  bytes  redundant
0       forward   0.weight    float32 to bfloat16      2  1,200
(root)  forward   activation  float32 to bfloat16      3     30  cast before
0       forward   gradient    float32 to bfloat16      1      7
0       backward  0.weight    bfloat16 to float32      1    600

op         inputs    output    forward  backward
aten.mm    bfloat16  bfloat16       12         3
aten.relu  float32   float32         1         0

7 casts, 1,837 bytes
2 of weights, 1,200 bytes: a WeightCache keeps these
3 redundant, 30 bytes"""
    )


def test_a_trace_as_a_dict() -> None:
    found = Trace(OPS, CASTS).as_dict()
    assert list(found) == ["ops", "casts", "totals"]
    assert found["ops"][0] == {
        "op": "aten.mm",
        "inputs": "bfloat16",
        "output": "bfloat16",
        "forward": 12,
        "backward": 3,
    }
    assert found["totals"] == {
        "all": {"casts": 7, "nbytes": 1837},
        "weights": {"casts": 2, "nbytes": 1200},
        "redundant": {"casts": 3, "nbytes": 30},
    }
