"""What the cycle model assumes of the chip, each figure with its public source.

Sources by their short names; all but the last three are pages of ROCm/gfx950-gluon-tutorials:

- *tiles*: docs/tcp_bound_tile_model.md
- *loads*: kernels/gemm/intra_wave/a16w16/v8_sliceMN/README.md, section 4
- *lds*: docs/lds_throughput.md and experiments/lds_throughput_validation/README.md
- *scaled*: kernels/gemm/inter_wave/a4w4/v1_combineBsc/README.md, section 3
- *writes*: kernels/gemm/intra_wave/a4w4/v0_sliceN/README.md, section 3.6
- *coissue*: kernels/attention/mfma_coissue_scheduling.md
- *skinny*: kernels/memory_bound/gemm/README.md
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
        registers: vector registers of a SIMD's lane; a wave gets a multiple of 8.
        waves_per_simd: that a SIMD can hold.
        issue_cycles: a wave issues at most one instruction in this time, and a SIMD one
            instruction of each kind (*lds* 1.1).
        branch_cycles: until the instruction behind a taken branch issues (*gcn*).
        scalar_latency: cycles of a scalar load that hits its cache (*gcn*).
        mfma_read_cycles: from the start of an MFMA, in which the SIMD issues no other vector, LDS
            or memory instruction (*scaled* 3.1, *coissue*).
        mfma_scale_cycles: ahead of a scaled MFMA, for its scales; they may overlap the end of the
            MFMA before it (*scaled* 3.1).
        mfma_to_vector: cycles from the end of an MFMA to the first use of its result by anything
            but the accumulator of the next MFMA, and to a packed instruction (*coissue*).
        lds_bytes: size of the LDS.
        lds_bytes_per_cycle: 64 banks of 4 bytes (*lds* 1.3).
        lds_bus_bytes_per_cycle: between LDS and a pair of SIMDs, in each direction (*lds* 1.4).
        lds_queue: requests of a pair of SIMDs in front of LDS (*lds* 1.6).
        lds_latency: cycles from issue to the data of an undisturbed read (*lds* 1.6: 50 to 70).
        line_bytes: unit of TCP and L2; a load takes whole lines (*cdna3*).
        cache_bytes: of TCP, which loads in flight occupy (*loads* 4.1).
        load_queue: loads of a compute unit in front of TCP (*loads* 4.2).
        load_bytes_per_cycle: that TCP processes (*loads* 4.3: 16 cycles for 1 KiB).
        tcp_latency: cycles of a load that hits TCP (*cdna3*, measured by others as 57 ns).
        l2_bytes_per_cycle: that L2 delivers to one compute unit (*cdna3*).
        l2_latency: cycles of a load that hits L2, from TCP on: 1000 from issue on, of which it is
            in TCP for 32 of 44 KiB (*tiles* 1).
        stream_bytes_per_second: that HBM delivers at best: 7.3 of 8 TB/s.
        stream_latency: cycles of a load from idle HBM. Fitted.
        stream_queue: cycles that this latency grows by at half the best rate. Fitted.
    """

    compute_units: int = 256
    clock_hz: float = 2.4e9
    simds: int = 4
    registers: int = 512
    waves_per_simd: int = 8
    issue_cycles: float = 4
    branch_cycles: float = 16
    scalar_latency: float = 200
    mfma_read_cycles: float = 8
    mfma_scale_cycles: float = 4
    mfma_to_vector: float = 12
    lds_bytes: int = 160 * KIB
    lds_bytes_per_cycle: float = 256
    lds_bus_bytes_per_cycle: float = 128
    lds_queue: int = 8
    lds_latency: float = 64
    line_bytes: int = 128
    cache_bytes: int = 32 * KIB
    load_queue: int = 12
    load_bytes_per_cycle: float = 64
    tcp_latency: float = 120
    l2_bytes_per_cycle: float = 64
    l2_latency: float = 730
    stream_bytes_per_second: float = 7.3e12
    stream_latency: float = 1500
    stream_queue: float = 200

    @property
    def stream_bytes_per_cycle(self) -> float:
        """One compute unit's share of HBM."""
        return self.stream_bytes_per_second / self.compute_units / self.clock_hz

    def loaded_latency(self, load: float) -> float:
        """Latency of HBM while it delivers a share `load` of its best rate.

        >>> chip = Chip(stream_latency=1000, stream_queue=100)
        >>> chip.loaded_latency(0.0), chip.loaded_latency(0.5)
        (1000.0, 1100.0)
        """
        load = min(load, 0.98)
        return self.stream_latency + self.stream_queue * load / (1 - load)

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
