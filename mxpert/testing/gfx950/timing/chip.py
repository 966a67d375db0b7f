"""What the cycle model assumes of the chip, each figure with its public source.

Sources by their short names:

- *tiles*: ROCm/gfx950-gluon-tutorials, docs/tcp_bound_tile_model.md
- *lds*: the same, docs/lds_throughput.md
- *coissue*: the same, kernels/attention/mfma_coissue_scheduling.md
- *bandwidth*: the same, docs/memory_bandwidth_model.md and kernels/memory_bound/gemm/README.md
- *llvm*: llvm/lib/Target/AMDGPU/SISchedule.td
- *gcn*: CLRX documentation, "GCN ISA Instruction Timings"
- *cdna3*: AMD CDNA 3 white paper
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True)
class Chip:
    """One MI355X as the model sees it: 256 equal compute units that share the memory.

    Cycles are cycles of the shader clock.

    Args:
        compute_units: number of compute units (*tiles*).
        clock_hz: highest shader clock (*tiles*).
        simds: SIMDs of a compute unit.
        issue_cycles: a wave issues at most one instruction in this time, and a SIMD one
            instruction of each kind (*lds* 1.1).
        branch_cycles: until the instruction behind a taken branch issues (*gcn*).
        scalar_latency: cycles of a scalar load that hits its cache (*gcn*).
        mfma_read_phase: share of an MFMA's time in which no vector instruction issues beside
            it: 8 of 32 cycles (*coissue*).
        mfma_to_vector: cycles from the end of an MFMA to the first use of its result by
            anything but the next MFMA's accumulator, and to a packed instruction (*coissue*).
        load_latency: cycles of a load's round trip while the memory is not saturated (*tiles* 1).
        bytes_in_flight: of loads of one compute unit: 32 KiB of TCP and 12 queued requests of
            1 KiB (*tiles* 1).
        load_bytes_per_cycle: of the path from TCP to registers or LDS (*cdna3*).
        line_bytes: unit of TCP and L2; a load takes whole lines (*cdna3*).
        cache_bytes: of TCP (*tiles* 1).
        memory_bytes_per_cycle: what L2 delivers to one compute unit (*cdna3*).
        stream_bytes_per_second: what HBM delivers at best: 7.3 of 8 TB/s.
        lds_bytes_per_cycle: 64 banks of 4 bytes (*lds* 1.3).
        lds_bus_bytes_per_cycle: between LDS and a pair of SIMDs, in each direction (*lds* 1.4).
        lds_queue: requests that a pair of SIMDs can have in front of LDS (*lds* 1.6).
        lds_latency: cycles from issue to the data of an undisturbed read (*lds* 1.6: 50 to 70).
        lds_bytes: size of the LDS.
        registers: vector registers of a SIMD's lane; a wave gets multiples of 8.
        waves_per_simd: that a SIMD can hold.
    """

    compute_units: int = 256
    clock_hz: float = 2.4e9
    simds: int = 4
    issue_cycles: float = 4
    branch_cycles: float = 16
    scalar_latency: float = 200
    mfma_read_phase: float = 0.25
    mfma_to_vector: float = 12
    load_latency: float = 1000
    bytes_in_flight: int = 44 * KIB
    load_bytes_per_cycle: float = 64
    line_bytes: int = 128
    cache_bytes: int = 32 * KIB
    memory_bytes_per_cycle: float = 64
    stream_bytes_per_second: float = 7.3e12
    lds_bytes_per_cycle: float = 256
    lds_bus_bytes_per_cycle: float = 128
    lds_queue: int = 8
    lds_latency: float = 64
    lds_bytes: int = 160 * KIB
    registers: int = 512
    waves_per_simd: int = 8

    @property
    def stream_bytes_per_cycle(self) -> float:
        """One compute unit's share of HBM."""
        return self.stream_bytes_per_second / self.compute_units / self.clock_hz

    def workgroups(self, waves: int, vector_registers: int, lds_bytes: int) -> int:
        """Workgroups that fit into one compute unit, 1 at least.

        >>> Chip().workgroups(4, 128, 64 * 1024)
        2
        """
        allocated = -(-max(vector_registers, 1) // 8) * 8
        per_simd = min(self.waves_per_simd, self.registers // allocated)
        by_lds = self.lds_bytes // lds_bytes if lds_bytes else per_simd * self.simds
        return max(1, min(per_simd * self.simds // waves, by_lds))

    def terabytes_per_second(self, bytes_per_cycle: float) -> float:
        """A rate of one compute unit, as that of all of them.

        >>> round(Chip().terabytes_per_second(10), 3)
        6.144
        """
        return bytes_per_cycle * self.compute_units * self.clock_hz / 1e12


MI355X = Chip()
