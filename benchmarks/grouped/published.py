"""What Primus-Turbo published for the shapes of grouped/run.py, and the FP8 peak of each chip.

Their chip is another one, so rates are compared as shares of each chip's dense FP8 peak.
"""

from __future__ import annotations

from benchmarks.gfx950.published import PEAK_TFLOPS

SOURCE = "Primus-Turbo, MXFP8 grouped GEMM (pull request 330), MI355X, CUDA events, 100 calls"
BALANCES = ("balanced", "random")
"""Ours; they call a random split of the same rows unbalanced."""
OPS = (
    ("forward", False),
    ("dgrad", False),
    ("wgrad", False),
    ("forward", True),
    ("backward", True),
)
"""Columns of `_TEXT` for each balance: the op, and whether quantisation is part of the time."""

_TEXT = """
16x2048-4096-7168 2178.9 2080.4 1731.7 1106.1 1685.8 1602.9 1563.8 1744.8 921.5 1452.3
16x4096-4096-7168 2342.9 2165.2 2211 1345.9 1948 1735.1 1695.7 2145.8 1129.8 1721.4
32x2048-4096-7168 1327.1 1224 1708.1 810.2 1280.4 1328.6 1282.6 1670.2 821.9 1322.5
32x4096-4096-7168 2359.5 2147.5 2052.6 1336.6 1830.8 1585.9 1442 2026.7 1037.7 1562.3
16x2048-7168-2048 1620.2 2162.9 1752.1 1011.1 1346.5 1267.1 1461.9 1756.6 854.6 1159.3
16x4096-7168-2048 1695 2275.7 2139.4 1210.8 1519.5 1473 1766.4 2063.4 1093.2 1372.3
32x2048-7168-2048 917.9 1314.5 1716.6 677.8 1102.3 1008 1356 1674.3 724.3 1122.7
32x4096-7168-2048 1636 2279.1 2025.1 1168.6 1474.2 1232.4 1522.5 1992.2 935.9 1262.4
4x2048-5760-2880 1494.2 1064.2 1423 829.4 929.5 1213.4 1288.7 1417.8 743.8 998.3
4x4096-5760-2880 1699.8 1718 1797 1145.8 1283.8 1504.1 1652.2 1748.4 1011.5 1283.1
32x2048-5760-2880 1037.5 1258.5 1547.6 703.3 1120.6 1123.9 1335.5 1508.3 724.2 1103.7
32x4096-5760-2880 1822.4 2144.3 1835.3 1161.3 1546.9 1350.7 1521 1779.7 943.7 1318.1
4x2048-2880-2880 855.2 856.8 1291.8 534.6 733.8 1035.8 1034.2 1233.2 602.4 769.9
4x4096-2880-2880 1451.9 1438 1634.3 860.4 1126.4 1378.9 1378.2 1540.8 846.4 1069.4
32x2048-2880-2880 988.1 991.3 1525.2 638.2 989.3 1072.2 1072.6 1461 652.1 996.8
32x4096-2880-2880 1751.7 1770.5 1853.2 1030.8 1389.9 1390 1387.7 1746.3 870.5 1204
"""
"""G×rows-N-K, then TFLOP/s: each of `OPS` with balanced groups, then with unbalanced ones."""

Key = tuple[str, str, str, bool]
"""Shape, balance (ours), op, with_quant."""


def _parse(text: str) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for line in text.split("\n"):
        shape, *numbers = line.split() or [""]
        keys = [(balance, *op) for balance in BALANCES for op in OPS]
        for (balance, op, with_quant), number in zip(keys, numbers, strict=False):
            found[shape, balance, op, with_quant] = float(number)
    return found


PUBLISHED = _parse(_TEXT)
"""TFLOP/s of the reference."""
REFERENCE_PEAK = PEAK_TFLOPS["fp8"]
"""TFLOP/s of MI355X."""
DEVICE_PEAKS = {
    "H200": 1979.0,
    "H100 PCIe": 1513.0,
    "H100 NVL": 1671.0,
    "H100": 1979.0,
    "H20": 296.0,
    "MI355X": REFERENCE_PEAK,
}
"""Dense FP8 TFLOP/s by a part of the device's name, the first that it has."""


def peak_of(device: str) -> float | None:
    """FP8 peak of a device by its name, None where it is not listed.

    >>> peak_of("NVIDIA H200"), peak_of("NVIDIA H100 PCIe")
    (1979.0, 1513.0)
    """
    return next((peak for name, peak in DEVICE_PEAKS.items() if name in device), None)
