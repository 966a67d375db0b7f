"""What operands the pseudocode of an instruction reads and writes."""

from __future__ import annotations

import re


class Shape:
    """Operands that a pseudocode text reads and writes."""

    def __init__(self, text: str) -> None:
        left = re.sub(r"=(?!=)[^\n]*", "=", text)
        self.wide = [
            bool(re.search(rf"S{k}(\.[uibf]64\b|\[63 : 32\]|\.u32\[OPSEL)", text)) for k in range(3)
        ]
        self.signs = [
            next((int(w) - 1 for w in ("16", "32", "64") if f"S{k}.f{w}" in text), 31)
            for k in range(3)
        ]
        """Sign bits of the sources."""
        self.sources = max((k + 1 for k in range(3) if re.search(rf"\bS{k}\b", text)), default=0)
        self.literal = "SIMM32" in text
        self.mask_result = "D0.u64[laneId] =" in left
        self.flag = bool(re.search(r"VCC = 0x", text))
        self.carries = self.flag or "VCC.u64[laneId] =" in left or "D1" in left
        self.reads_mask = bool(re.search(r"VCC\.u64\[laneId\](?! =)", text))
        wide = r"D0(\.[uibf]64\b|\[63 : 32\]|\.u32\[63 : 32\])"
        self.wide_result = bool(re.search(wide, left)) and not self.mask_result
        found = re.search(r"\.(bf16|f16|f32|f64) =", left)
        self.float = found[1] if found else ""
