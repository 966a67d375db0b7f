"""Opcode numbers and operand sizes of CDNA4, by encoding.

Source: AMD's machine-readable ISA of CDNA4 (amdgpu_isa_cdna4), opcodes and operands. The e64 forms
of VOP1, VOP2 and VOPC are left out: their VOP3 opcode is the short one plus a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Opcode:
    """One entry of the tables.

    Args:
        name: mnemonic without the suffix of its encoding.
        sizes: registers of each vector or scalar operand in the order of the listing.
        fields: of an LDS instruction, the field of each operand: "d" vdst, "a" addr, "x" data0,
            "y" data1.
    """

    name: str
    sizes: tuple[int, ...]
    fields: str = ""


@functools.cache
def opcodes(encoding: str) -> Mapping[int, Opcode]:
    """The opcodes of an encoding ("SOP2", "VOP3", …) by number.

    Example:
        >>> opcodes("DS")[119]
        Opcode(name='ds_read2_b64', sizes=(4, 1), fields='da')
    """
    found = {}
    for entry in _TABLES[encoding].split():
        number, _, described = entry.partition(":")
        name, _, shape = described.partition("=")
        parts = (shape or _DEFAULTS.get(encoding, "")).split(".")
        letters = "".join(part[0] for part in parts if part[:1].isalpha())
        sizes = tuple(int(part.lstrip("daxy") or 1) for part in parts if part and part != "0")
        found[int(number)] = Opcode(name, sizes, letters)
    return found


_DEFAULTS = {
    **dict.fromkeys(("SOPK", "SMEM", "MUBUF", "GLOBAL", "SCRATCH"), "1"),
    **dict.fromkeys(("SOP1", "SOPC", "VOP1", "VOPC"), "1.1"),
    **dict.fromkeys(("SOP2", "VOP2"), "1.1.1"),
    **dict.fromkeys(("VOP3", "VOP3SD", "VOP3P"), "1.1.1.1"),
}
"""Sizes where an entry states none."""

_TABLES: Mapping[str, str] = {
    "DS": """
        0:ds_add_u32=a.x 1:ds_sub_u32=a.x 2:ds_rsub_u32=a.x 3:ds_inc_u32=a.x 4:ds_dec_u32=a.x
        5:ds_min_i32=a.x 6:ds_max_i32=a.x 7:ds_min_u32=a.x 8:ds_max_u32=a.x 9:ds_and_b32=a.x
        10:ds_or_b32=a.x 11:ds_xor_b32=a.x 12:ds_mskor_b32=a.x.y 13:ds_write_b32=a.x
        14:ds_write2_b32=a.x.y 15:ds_write2st64_b32=a.x.y 16:ds_cmpst_b32=a.x.y
        17:ds_cmpst_f32=a.x.y 18:ds_min_f32=a.x 19:ds_max_f32=a.x 20:ds_nop 21:ds_add_f32=a.x
        23:ds_pk_add_f16=a.x 24:ds_pk_add_bf16=a.x 29:ds_write_addtid_b32=x 30:ds_write_b8=a.x
        31:ds_write_b16=a.x 32:ds_add_rtn_u32=d.a.x 33:ds_sub_rtn_u32=d.a.x 34:ds_rsub_rtn_u32=d.a.x
        35:ds_inc_rtn_u32=d.a.x 36:ds_dec_rtn_u32=d.a.x 37:ds_min_rtn_i32=d.a.x
        38:ds_max_rtn_i32=d.a.x 39:ds_min_rtn_u32=d.a.x 40:ds_max_rtn_u32=d.a.x
        41:ds_and_rtn_b32=d.a.x 42:ds_or_rtn_b32=d.a.x 43:ds_xor_rtn_b32=d.a.x
        44:ds_mskor_rtn_b32=d.a.x.y 45:ds_wrxchg_rtn_b32=d.a.x 46:ds_wrxchg2_rtn_b32=d2.a.x.y
        47:ds_wrxchg2st64_rtn_b32=d2.a.x.y 48:ds_cmpst_rtn_b32=d.a.x.y 49:ds_cmpst_rtn_f32=d.a.x.y
        50:ds_min_rtn_f32=d.a.x 51:ds_max_rtn_f32=d.a.x 52:ds_wrap_rtn_b32=d.a.x.y
        53:ds_add_rtn_f32=d.a.x 54:ds_read_b32=d.a 55:ds_read2_b32=d2.a 56:ds_read2st64_b32=d2.a
        57:ds_read_i8=d.a 58:ds_read_u8=d.a 59:ds_read_i16=d.a 60:ds_read_u16=d.a
        61:ds_swizzle_b32=d.a 62:ds_permute_b32=d.a.x 63:ds_bpermute_b32=d.a.x 64:ds_add_u64=a.x2
        65:ds_sub_u64=a.x2 66:ds_rsub_u64=a.x2 67:ds_inc_u64=a.x2 68:ds_dec_u64=a.x2
        69:ds_min_i64=a.x2 70:ds_max_i64=a.x2 71:ds_min_u64=a.x2 72:ds_max_u64=a.x2
        73:ds_and_b64=a.x2 74:ds_or_b64=a.x2 75:ds_xor_b64=a.x2 76:ds_mskor_b64=a.x2.y2
        77:ds_write_b64=a.x2 78:ds_write2_b64=a.x2.y2 79:ds_write2st64_b64=a.x2.y2
        80:ds_cmpst_b64=a.x2.y2 81:ds_cmpst_f64=a.x2.y2 82:ds_min_f64=a.x2 83:ds_max_f64=a.x2
        84:ds_write_b8_d16_hi=a.x 85:ds_write_b16_d16_hi=a.x 86:ds_read_u8_d16=d.a
        87:ds_read_u8_d16_hi=d.a 88:ds_read_i8_d16=d.a 89:ds_read_i8_d16_hi=d.a
        90:ds_read_u16_d16=d.a 91:ds_read_u16_d16_hi=d.a 92:ds_add_f64=a.x2
        96:ds_add_rtn_u64=d2.a.x2 97:ds_sub_rtn_u64=d2.a.x2 98:ds_rsub_rtn_u64=d2.a.x2
        99:ds_inc_rtn_u64=d2.a.x2 100:ds_dec_rtn_u64=d2.a.x2 101:ds_min_rtn_i64=d2.a.x2
        102:ds_max_rtn_i64=d2.a.x2 103:ds_min_rtn_u64=d2.a.x2 104:ds_max_rtn_u64=d2.a.x2
        105:ds_and_rtn_b64=d2.a.x2 106:ds_or_rtn_b64=d2.a.x2 107:ds_xor_rtn_b64=d2.a.x2
        108:ds_mskor_rtn_b64=d2.a.x2.y2 109:ds_wrxchg_rtn_b64=d2.a.x2
        110:ds_wrxchg2_rtn_b64=d4.a.x2.y2 111:ds_wrxchg2st64_rtn_b64=d4.a.x2.y2
        112:ds_cmpst_rtn_b64=d2.a.x2.y2 113:ds_cmpst_rtn_f64=d2.a.x2.y2 114:ds_min_rtn_f64=d2.a.x2
        115:ds_max_rtn_f64=d2.a.x2 118:ds_read_b64=d2.a 119:ds_read2_b64=d4.a
        120:ds_read2st64_b64=d4.a 124:ds_add_rtn_f64=d2.a.x2 126:ds_condxchg32_rtn_b64=d2.a.x2
        152:ds_gws_sema_release_all 154:ds_gws_sema_v 156:ds_gws_sema_p 182:ds_read_addtid_b32=d
        183:ds_pk_add_rtn_f16=d.a.x 184:ds_pk_add_rtn_bf16=d.a.x 189:ds_consume=d 190:ds_append=d
        222:ds_write_b96=a.x3 223:ds_write_b128=a.x4 224:ds_read_b64_tr_b4=d2.a
        225:ds_read_b96_tr_b6=d3.a 226:ds_read_b64_tr_b8=d2.a 227:ds_read_b64_tr_b16=d2.a
        254:ds_read_b96=d3.a 255:ds_read_b128=d4.a
    """,
    "GLOBAL": """
        16:global_load_ubyte 17:global_load_sbyte 18:global_load_ushort 19:global_load_sshort
        20:global_load_dword 21:global_load_dwordx2=2 22:global_load_dwordx3=3
        23:global_load_dwordx4=4 24:global_store_byte 25:global_store_byte_d16_hi
        26:global_store_short 27:global_store_short_d16_hi 28:global_store_dword
        29:global_store_dwordx2=2 30:global_store_dwordx3=3 31:global_store_dwordx4=4
        32:global_load_ubyte_d16 33:global_load_ubyte_d16_hi 34:global_load_sbyte_d16
        35:global_load_sbyte_d16_hi 36:global_load_short_d16 37:global_load_short_d16_hi
        38:global_load_lds_ubyte 39:global_load_lds_sbyte 40:global_load_lds_ushort
        41:global_load_lds_sshort 42:global_load_lds_dword 64:global_atomic_swap
        65:global_atomic_cmpswap=1.2 66:global_atomic_add 67:global_atomic_sub 68:global_atomic_smin
        69:global_atomic_umin 70:global_atomic_smax 71:global_atomic_umax 72:global_atomic_and
        73:global_atomic_or 74:global_atomic_xor 75:global_atomic_inc 76:global_atomic_dec
        77:global_atomic_add_f32 78:global_atomic_pk_add_f16 79:global_atomic_add_f64=2
        80:global_atomic_min_f64=2 81:global_atomic_max_f64=2 82:global_atomic_pk_add_bf16
        96:global_atomic_swap_x2=2 97:global_atomic_cmpswap_x2=2.4 98:global_atomic_add_x2=2
        99:global_atomic_sub_x2=2 100:global_atomic_smin_x2=2 101:global_atomic_umin_x2=2
        102:global_atomic_smax_x2=2 103:global_atomic_umax_x2=2 104:global_atomic_and_x2=2
        105:global_atomic_or_x2=2 106:global_atomic_xor_x2=2 107:global_atomic_inc_x2=2
        108:global_atomic_dec_x2=2 125:global_load_lds_dwordx4=4 126:global_load_lds_dwordx3=3
    """,
    "SCRATCH": """
        16:scratch_load_ubyte 17:scratch_load_sbyte 18:scratch_load_ushort 19:scratch_load_sshort
        20:scratch_load_dword 21:scratch_load_dwordx2=2 22:scratch_load_dwordx3=3
        23:scratch_load_dwordx4=4 24:scratch_store_byte 25:scratch_store_byte_d16_hi
        26:scratch_store_short 27:scratch_store_short_d16_hi 28:scratch_store_dword
        29:scratch_store_dwordx2=2 30:scratch_store_dwordx3=3 31:scratch_store_dwordx4=4
        32:scratch_load_ubyte_d16 33:scratch_load_ubyte_d16_hi 34:scratch_load_sbyte_d16
        35:scratch_load_sbyte_d16_hi 36:scratch_load_short_d16 37:scratch_load_short_d16_hi
        38:scratch_load_lds_ubyte 39:scratch_load_lds_sbyte 40:scratch_load_lds_ushort
        41:scratch_load_lds_sshort 42:scratch_load_lds_dword
    """,
    "MUBUF": """
        0:buffer_load_format_x 1:buffer_load_format_xy=2 2:buffer_load_format_xyz=3
        3:buffer_load_format_xyzw=4 4:buffer_store_format_x 5:buffer_store_format_xy=2
        6:buffer_store_format_xyz=3 7:buffer_store_format_xyzw=4 8:buffer_load_format_d16_x
        9:buffer_load_format_d16_xy 10:buffer_load_format_d16_xyz=2 11:buffer_load_format_d16_xyzw=2
        12:buffer_store_format_d16_x 13:buffer_store_format_d16_xy 14:buffer_store_format_d16_xyz=2
        15:buffer_store_format_d16_xyzw=2 16:buffer_load_ubyte 17:buffer_load_sbyte
        18:buffer_load_ushort 19:buffer_load_sshort 20:buffer_load_dword 21:buffer_load_dwordx2=2
        22:buffer_load_dwordx3=3 23:buffer_load_dwordx4=4 24:buffer_store_byte
        25:buffer_store_byte_d16_hi 26:buffer_store_short 27:buffer_store_short_d16_hi
        28:buffer_store_dword 29:buffer_store_dwordx2=2 30:buffer_store_dwordx3=3
        31:buffer_store_dwordx4=4 32:buffer_load_ubyte_d16 33:buffer_load_ubyte_d16_hi
        34:buffer_load_sbyte_d16 35:buffer_load_sbyte_d16_hi 36:buffer_load_short_d16
        37:buffer_load_short_d16_hi 38:buffer_load_format_d16_hi_x 39:buffer_store_format_d16_hi_x
        40:buffer_wbl2 41:buffer_inv 64:buffer_atomic_swap 65:buffer_atomic_cmpswap=2
        66:buffer_atomic_add 67:buffer_atomic_sub 68:buffer_atomic_smin 69:buffer_atomic_umin
        70:buffer_atomic_smax 71:buffer_atomic_umax 72:buffer_atomic_and 73:buffer_atomic_or
        74:buffer_atomic_xor 75:buffer_atomic_inc 76:buffer_atomic_dec 77:buffer_atomic_add_f32
        78:buffer_atomic_pk_add_f16 79:buffer_atomic_add_f64=2 80:buffer_atomic_min_f64=2
        81:buffer_atomic_max_f64=2 82:buffer_atomic_pk_add_bf16 96:buffer_atomic_swap_x2=2
        97:buffer_atomic_cmpswap_x2=4 98:buffer_atomic_add_x2=2 99:buffer_atomic_sub_x2=2
        100:buffer_atomic_smin_x2=2 101:buffer_atomic_umin_x2=2 102:buffer_atomic_smax_x2=2
        103:buffer_atomic_umax_x2=2 104:buffer_atomic_and_x2=2 105:buffer_atomic_or_x2=2
        106:buffer_atomic_xor_x2=2 107:buffer_atomic_inc_x2=2 108:buffer_atomic_dec_x2=2
    """,
    "SMEM": """
        0:s_load_dword 1:s_load_dwordx2=2 2:s_load_dwordx4=4 3:s_load_dwordx8=8 4:s_load_dwordx16=16
        8:s_buffer_load_dword 9:s_buffer_load_dwordx2=2 10:s_buffer_load_dwordx4=4
        11:s_buffer_load_dwordx8=8 12:s_buffer_load_dwordx16=16 16:s_store_dword
        17:s_store_dwordx2=2 18:s_store_dwordx4=4 24:s_buffer_store_dword
        25:s_buffer_store_dwordx2=2 26:s_buffer_store_dwordx4=4 32:s_dcache_inv 33:s_dcache_wb
        34:s_dcache_inv_vol 35:s_dcache_wb_vol 36:s_memtime=2 37:s_memrealtime=2 40:s_dcache_discard
        41:s_dcache_discard_x2
    """,
    "SOP1": """
        0:s_mov_b32 1:s_mov_b64=2.2 2:s_cmov_b32 3:s_cmov_b64=2.2 4:s_not_b32 5:s_not_b64=2.2
        6:s_wqm_b32 7:s_wqm_b64=2.2 8:s_brev_b32 9:s_brev_b64=2.2 10:s_bcnt0_i32_b32
        11:s_bcnt0_i32_b64=1.2 12:s_bcnt1_i32_b32 13:s_bcnt1_i32_b64=1.2 14:s_ff0_i32_b32
        15:s_ff0_i32_b64=1.2 16:s_ff1_i32_b32 17:s_ff1_i32_b64=1.2 18:s_flbit_i32_b32
        19:s_flbit_i32_b64=1.2 20:s_flbit_i32 21:s_flbit_i32_i64=1.2 22:s_sext_i32_i8
        23:s_sext_i32_i16 24:s_bitset0_b32 25:s_bitset0_b64=2.1 26:s_bitset1_b32
        27:s_bitset1_b64=2.1 28:s_getpc_b64=2 29:s_setpc_b64=2 30:s_swappc_b64=2.2 31:s_rfe_b64=2
        32:s_and_saveexec_b64=2.2 33:s_or_saveexec_b64=2.2 34:s_xor_saveexec_b64=2.2
        35:s_andn2_saveexec_b64=2.2 36:s_orn2_saveexec_b64=2.2 37:s_nand_saveexec_b64=2.2
        38:s_nor_saveexec_b64=2.2 39:s_xnor_saveexec_b64=2.2 40:s_quadmask_b32 41:s_quadmask_b64=2.2
        42:s_movrels_b32 43:s_movrels_b64=2.2 44:s_movreld_b32 45:s_movreld_b64=2.2
        46:s_cbranch_join=1 48:s_abs_i32 50:s_set_gpr_idx_idx=1 51:s_andn1_saveexec_b64=2.2
        52:s_orn1_saveexec_b64=2.2 53:s_andn1_wrexec_b64=2.2 54:s_andn2_wrexec_b64=2.2
        55:s_bitreplicate_b64_b32=2.1
    """,
    "SOP2": """
        0:s_add_u32 1:s_sub_u32 2:s_add_i32 3:s_sub_i32 4:s_addc_u32 5:s_subb_u32 6:s_min_i32
        7:s_min_u32 8:s_max_i32 9:s_max_u32 10:s_cselect_b32 11:s_cselect_b64=2.2.2 12:s_and_b32
        13:s_and_b64=2.2.2 14:s_or_b32 15:s_or_b64=2.2.2 16:s_xor_b32 17:s_xor_b64=2.2.2
        18:s_andn2_b32 19:s_andn2_b64=2.2.2 20:s_orn2_b32 21:s_orn2_b64=2.2.2 22:s_nand_b32
        23:s_nand_b64=2.2.2 24:s_nor_b32 25:s_nor_b64=2.2.2 26:s_xnor_b32 27:s_xnor_b64=2.2.2
        28:s_lshl_b32 29:s_lshl_b64=2.2.1 30:s_lshr_b32 31:s_lshr_b64=2.2.1 32:s_ashr_i32
        33:s_ashr_i64=2.2.1 34:s_bfm_b32 35:s_bfm_b64=2.1.1 36:s_mul_i32 37:s_bfe_u32 38:s_bfe_i32
        39:s_bfe_u64=2.2.1 40:s_bfe_i64=2.2.1 41:s_cbranch_g_fork=2.2 42:s_absdiff_i32
        43:s_rfe_restore_b64=2.1 44:s_mul_hi_u32 45:s_mul_hi_i32 46:s_lshl1_add_u32
        47:s_lshl2_add_u32 48:s_lshl3_add_u32 49:s_lshl4_add_u32 50:s_pack_ll_b32_b16
        51:s_pack_lh_b32_b16 52:s_pack_hh_b32_b16
    """,
    "SOPC": """
        0:s_cmp_eq_i32 1:s_cmp_lg_i32 2:s_cmp_gt_i32 3:s_cmp_ge_i32 4:s_cmp_lt_i32 5:s_cmp_le_i32
        6:s_cmp_eq_u32 7:s_cmp_lg_u32 8:s_cmp_gt_u32 9:s_cmp_ge_u32 10:s_cmp_lt_u32 11:s_cmp_le_u32
        12:s_bitcmp0_b32 13:s_bitcmp1_b32 14:s_bitcmp0_b64=2.1 15:s_bitcmp1_b64=2.1 16:s_setvskip
        17:s_set_gpr_idx_on 18:s_cmp_eq_u64=2.2 19:s_cmp_lg_u64=2.2
    """,
    "SOPK": """
        0:s_movk_i32 1:s_cmovk_i32 2:s_cmpk_eq_i32 3:s_cmpk_lg_i32 4:s_cmpk_gt_i32 5:s_cmpk_ge_i32
        6:s_cmpk_lt_i32 7:s_cmpk_le_i32 8:s_cmpk_eq_u32 9:s_cmpk_lg_u32 10:s_cmpk_gt_u32
        11:s_cmpk_ge_u32 12:s_cmpk_lt_u32 13:s_cmpk_le_u32 14:s_addk_i32 15:s_mulk_i32
        16:s_cbranch_i_fork=2 17:s_getreg_b32 18:s_setreg_b32 20:s_setreg_imm32_b32 21:s_call_b64=2
    """,
    "SOPP": """
        0:s_nop 1:s_endpgm 2:s_branch 3:s_wakeup 4:s_cbranch_scc0 5:s_cbranch_scc1 6:s_cbranch_vccz
        7:s_cbranch_vccnz 8:s_cbranch_execz 9:s_cbranch_execnz 10:s_barrier 11:s_setkill
        12:s_waitcnt 13:s_sethalt 14:s_sleep 15:s_setprio 16:s_sendmsg 17:s_sendmsghalt 18:s_trap
        19:s_icache_inv 20:s_incperflevel 21:s_decperflevel 22:s_ttracedata 23:s_cbranch_cdbgsys
        24:s_cbranch_cdbguser 25:s_cbranch_cdbgsys_or_user 26:s_cbranch_cdbgsys_and_user
        27:s_endpgm_saved 28:s_set_gpr_idx_off 29:s_set_gpr_idx_mode 30:s_endpgm_ordered_ps_done
        31:s_set_valu_coexec_mode
    """,
    "VOP1": """
        0:v_nop=0 1:v_mov_b32 2:v_readfirstlane_b32 3:v_cvt_i32_f64=1.2 4:v_cvt_f64_i32=2.1
        5:v_cvt_f32_i32 6:v_cvt_f32_u32 7:v_cvt_u32_f32 8:v_cvt_i32_f32 10:v_cvt_f16_f32
        11:v_cvt_f32_f16 12:v_cvt_rpi_i32_f32 13:v_cvt_flr_i32_f32 14:v_cvt_off_f32_i4
        15:v_cvt_f32_f64=1.2 16:v_cvt_f64_f32=2.1 17:v_cvt_f32_ubyte0 18:v_cvt_f32_ubyte1
        19:v_cvt_f32_ubyte2 20:v_cvt_f32_ubyte3 21:v_cvt_u32_f64=1.2 22:v_cvt_f64_u32=2.1
        23:v_trunc_f64=2.2 24:v_ceil_f64=2.2 25:v_rndne_f64=2.2 26:v_floor_f64=2.2 27:v_fract_f32
        28:v_trunc_f32 29:v_ceil_f32 30:v_rndne_f32 31:v_floor_f32 32:v_exp_f32 33:v_log_f32
        34:v_rcp_f32 35:v_rcp_iflag_f32 36:v_rsq_f32 37:v_rcp_f64=2.2 38:v_rsq_f64=2.2 39:v_sqrt_f32
        40:v_sqrt_f64=2.2 41:v_sin_f32 42:v_cos_f32 43:v_not_b32 44:v_bfrev_b32 45:v_ffbh_u32
        46:v_ffbl_b32 47:v_ffbh_i32 48:v_frexp_exp_i32_f64=1.2 49:v_frexp_mant_f64=2.2
        50:v_fract_f64=2.2 51:v_frexp_exp_i32_f32 52:v_frexp_mant_f32 53:v_clrexcp=0
        55:v_screen_partition_4se_b32 56:v_mov_b64=2.2 57:v_cvt_f16_u16 58:v_cvt_f16_i16
        59:v_cvt_u16_f16 60:v_cvt_i16_f16 61:v_rcp_f16 62:v_sqrt_f16 63:v_rsq_f16 64:v_log_f16
        65:v_exp_f16 66:v_frexp_mant_f16 67:v_frexp_exp_i16_f16 68:v_floor_f16 69:v_ceil_f16
        70:v_trunc_f16 71:v_rndne_f16 72:v_fract_f16 73:v_sin_f16 74:v_cos_f16 75:v_exp_legacy_f32
        76:v_log_legacy_f32 77:v_cvt_norm_i16_f16 78:v_cvt_norm_u16_f16 79:v_sat_pk_u8_i16
        81:v_swap_b32 82:v_accvgpr_mov_b32 84:v_cvt_f32_fp8 85:v_cvt_f32_bf8 86:v_cvt_pk_f32_fp8=2.1
        87:v_cvt_pk_f32_bf8=2.1 88:v_prng_b32 89:v_permlane16_swap_b32 90:v_permlane32_swap_b32
        91:v_cvt_f32_bf16
    """,
    "VOP2": """
        0:v_cndmask_b32 1:v_add_f32 2:v_sub_f32 3:v_subrev_f32 4:v_fmac_f64=2.2.2 5:v_mul_f32
        6:v_mul_i32_i24 7:v_mul_hi_i32_i24 8:v_mul_u32_u24 9:v_mul_hi_u32_u24 10:v_min_f32
        11:v_max_f32 12:v_min_i32 13:v_max_i32 14:v_min_u32 15:v_max_u32 16:v_lshrrev_b32
        17:v_ashrrev_i32 18:v_lshlrev_b32 19:v_and_b32 20:v_or_b32 21:v_xor_b32 22:v_dot2c_f32_bf16
        23:v_fmamk_f32 24:v_fmaak_f32 25:v_add_co_u32 26:v_sub_co_u32 27:v_subrev_co_u32
        28:v_addc_co_u32 29:v_subb_co_u32 30:v_subbrev_co_u32 31:v_add_f16 32:v_sub_f16
        33:v_subrev_f16 34:v_mul_f16 35:v_mac_f16 36:v_madmk_f16 37:v_madak_f16 38:v_add_u16
        39:v_sub_u16 40:v_subrev_u16 41:v_mul_lo_u16 42:v_lshlrev_b16 43:v_lshrrev_b16
        44:v_ashrrev_i16 45:v_max_f16 46:v_min_f16 47:v_max_u16 48:v_max_i16 49:v_min_u16
        50:v_min_i16 51:v_ldexp_f16 52:v_add_u32 53:v_sub_u32 54:v_subrev_u32 55:v_dot2c_f32_f16
        56:v_dot2c_i32_i16 57:v_dot4c_i32_i8 58:v_dot8c_i32_i4 59:v_fmac_f32 60:v_pk_fmac_f16
        61:v_xnor_b32
    """,
    "VOPC": """
        16:v_cmp_class_f32 17:v_cmpx_class_f32 18:v_cmp_class_f64=2.1 19:v_cmpx_class_f64=2.1
        20:v_cmp_class_f16 21:v_cmpx_class_f16 32:v_cmp_f_f16 33:v_cmp_lt_f16 34:v_cmp_eq_f16
        35:v_cmp_le_f16 36:v_cmp_gt_f16 37:v_cmp_lg_f16 38:v_cmp_ge_f16 39:v_cmp_o_f16
        40:v_cmp_u_f16 41:v_cmp_nge_f16 42:v_cmp_nlg_f16 43:v_cmp_ngt_f16 44:v_cmp_nle_f16
        45:v_cmp_neq_f16 46:v_cmp_nlt_f16 47:v_cmp_tru_f16 48:v_cmpx_f_f16 49:v_cmpx_lt_f16
        50:v_cmpx_eq_f16 51:v_cmpx_le_f16 52:v_cmpx_gt_f16 53:v_cmpx_lg_f16 54:v_cmpx_ge_f16
        55:v_cmpx_o_f16 56:v_cmpx_u_f16 57:v_cmpx_nge_f16 58:v_cmpx_nlg_f16 59:v_cmpx_ngt_f16
        60:v_cmpx_nle_f16 61:v_cmpx_neq_f16 62:v_cmpx_nlt_f16 63:v_cmpx_tru_f16 64:v_cmp_f_f32
        65:v_cmp_lt_f32 66:v_cmp_eq_f32 67:v_cmp_le_f32 68:v_cmp_gt_f32 69:v_cmp_lg_f32
        70:v_cmp_ge_f32 71:v_cmp_o_f32 72:v_cmp_u_f32 73:v_cmp_nge_f32 74:v_cmp_nlg_f32
        75:v_cmp_ngt_f32 76:v_cmp_nle_f32 77:v_cmp_neq_f32 78:v_cmp_nlt_f32 79:v_cmp_tru_f32
        80:v_cmpx_f_f32 81:v_cmpx_lt_f32 82:v_cmpx_eq_f32 83:v_cmpx_le_f32 84:v_cmpx_gt_f32
        85:v_cmpx_lg_f32 86:v_cmpx_ge_f32 87:v_cmpx_o_f32 88:v_cmpx_u_f32 89:v_cmpx_nge_f32
        90:v_cmpx_nlg_f32 91:v_cmpx_ngt_f32 92:v_cmpx_nle_f32 93:v_cmpx_neq_f32 94:v_cmpx_nlt_f32
        95:v_cmpx_tru_f32 96:v_cmp_f_f64=2.2 97:v_cmp_lt_f64=2.2 98:v_cmp_eq_f64=2.2
        99:v_cmp_le_f64=2.2 100:v_cmp_gt_f64=2.2 101:v_cmp_lg_f64=2.2 102:v_cmp_ge_f64=2.2
        103:v_cmp_o_f64=2.2 104:v_cmp_u_f64=2.2 105:v_cmp_nge_f64=2.2 106:v_cmp_nlg_f64=2.2
        107:v_cmp_ngt_f64=2.2 108:v_cmp_nle_f64=2.2 109:v_cmp_neq_f64=2.2 110:v_cmp_nlt_f64=2.2
        111:v_cmp_tru_f64=2.2 112:v_cmpx_f_f64=2.2 113:v_cmpx_lt_f64=2.2 114:v_cmpx_eq_f64=2.2
        115:v_cmpx_le_f64=2.2 116:v_cmpx_gt_f64=2.2 117:v_cmpx_lg_f64=2.2 118:v_cmpx_ge_f64=2.2
        119:v_cmpx_o_f64=2.2 120:v_cmpx_u_f64=2.2 121:v_cmpx_nge_f64=2.2 122:v_cmpx_nlg_f64=2.2
        123:v_cmpx_ngt_f64=2.2 124:v_cmpx_nle_f64=2.2 125:v_cmpx_neq_f64=2.2 126:v_cmpx_nlt_f64=2.2
        127:v_cmpx_tru_f64=2.2 160:v_cmp_f_i16 161:v_cmp_lt_i16 162:v_cmp_eq_i16 163:v_cmp_le_i16
        164:v_cmp_gt_i16 165:v_cmp_ne_i16 166:v_cmp_ge_i16 167:v_cmp_t_i16 168:v_cmp_f_u16
        169:v_cmp_lt_u16 170:v_cmp_eq_u16 171:v_cmp_le_u16 172:v_cmp_gt_u16 173:v_cmp_ne_u16
        174:v_cmp_ge_u16 175:v_cmp_t_u16 176:v_cmpx_f_i16 177:v_cmpx_lt_i16 178:v_cmpx_eq_i16
        179:v_cmpx_le_i16 180:v_cmpx_gt_i16 181:v_cmpx_ne_i16 182:v_cmpx_ge_i16 183:v_cmpx_t_i16
        184:v_cmpx_f_u16 185:v_cmpx_lt_u16 186:v_cmpx_eq_u16 187:v_cmpx_le_u16 188:v_cmpx_gt_u16
        189:v_cmpx_ne_u16 190:v_cmpx_ge_u16 191:v_cmpx_t_u16 192:v_cmp_f_i32 193:v_cmp_lt_i32
        194:v_cmp_eq_i32 195:v_cmp_le_i32 196:v_cmp_gt_i32 197:v_cmp_ne_i32 198:v_cmp_ge_i32
        199:v_cmp_t_i32 200:v_cmp_f_u32 201:v_cmp_lt_u32 202:v_cmp_eq_u32 203:v_cmp_le_u32
        204:v_cmp_gt_u32 205:v_cmp_ne_u32 206:v_cmp_ge_u32 207:v_cmp_t_u32 208:v_cmpx_f_i32
        209:v_cmpx_lt_i32 210:v_cmpx_eq_i32 211:v_cmpx_le_i32 212:v_cmpx_gt_i32 213:v_cmpx_ne_i32
        214:v_cmpx_ge_i32 215:v_cmpx_t_i32 216:v_cmpx_f_u32 217:v_cmpx_lt_u32 218:v_cmpx_eq_u32
        219:v_cmpx_le_u32 220:v_cmpx_gt_u32 221:v_cmpx_ne_u32 222:v_cmpx_ge_u32 223:v_cmpx_t_u32
        224:v_cmp_f_i64=2.2 225:v_cmp_lt_i64=2.2 226:v_cmp_eq_i64=2.2 227:v_cmp_le_i64=2.2
        228:v_cmp_gt_i64=2.2 229:v_cmp_ne_i64=2.2 230:v_cmp_ge_i64=2.2 231:v_cmp_t_i64=2.2
        232:v_cmp_f_u64=2.2 233:v_cmp_lt_u64=2.2 234:v_cmp_eq_u64=2.2 235:v_cmp_le_u64=2.2
        236:v_cmp_gt_u64=2.2 237:v_cmp_ne_u64=2.2 238:v_cmp_ge_u64=2.2 239:v_cmp_t_u64=2.2
        240:v_cmpx_f_i64=2.2 241:v_cmpx_lt_i64=2.2 242:v_cmpx_eq_i64=2.2 243:v_cmpx_le_i64=2.2
        244:v_cmpx_gt_i64=2.2 245:v_cmpx_ne_i64=2.2 246:v_cmpx_ge_i64=2.2 247:v_cmpx_t_i64=2.2
        248:v_cmpx_f_u64=2.2 249:v_cmpx_lt_u64=2.2 250:v_cmpx_eq_u64=2.2 251:v_cmpx_le_u64=2.2
        252:v_cmpx_gt_u64=2.2 253:v_cmpx_ne_u64=2.2 254:v_cmpx_ge_u64=2.2 255:v_cmpx_t_u64=2.2
    """,
    "VOP3": """
        450:v_mad_i32_i24 451:v_mad_u32_u24 452:v_cubeid_f32 453:v_cubesc_f32 454:v_cubetc_f32
        455:v_cubema_f32 456:v_bfe_u32 457:v_bfe_i32 458:v_bfi_b32 459:v_fma_f32
        460:v_fma_f64=2.2.2.2 461:v_lerp_u8 462:v_alignbit_b32 463:v_alignbyte_b32 464:v_min3_f32
        465:v_min3_i32 466:v_min3_u32 467:v_max3_f32 468:v_max3_i32 469:v_max3_u32 470:v_med3_f32
        471:v_med3_i32 472:v_med3_u32 473:v_sad_u8 474:v_sad_hi_u8 475:v_sad_u16 476:v_sad_u32
        477:v_cvt_pk_u8_f32 478:v_div_fixup_f32 479:v_div_fixup_f64=2.2.2.2 482:v_div_fmas_f32
        483:v_div_fmas_f64=2.2.2.2 484:v_msad_u8 485:v_qsad_pk_u16_u8=2.2.1.2
        486:v_mqsad_pk_u16_u8=2.2.1.2 487:v_mqsad_u32_u8=4.2.1.4 490:v_mad_legacy_f16
        491:v_mad_legacy_u16 492:v_mad_legacy_i16 493:v_perm_b32 494:v_fma_legacy_f16
        495:v_div_fixup_legacy_f16 496:v_cvt_pkaccum_u8_f32=1.1.1 497:v_mad_u32_u16
        498:v_mad_i32_i16 499:v_xad_u32 500:v_min3_f16 501:v_min3_i16 502:v_min3_u16 503:v_max3_f16
        504:v_max3_i16 505:v_max3_u16 506:v_med3_f16 507:v_med3_i16 508:v_med3_u16
        509:v_lshl_add_u32 510:v_add_lshl_u32 511:v_add3_u32 512:v_lshl_or_b32 513:v_and_or_b32
        514:v_or3_b32 515:v_mad_f16 516:v_mad_u16 517:v_mad_i16 518:v_fma_f16 519:v_div_fixup_f16
        520:v_lshl_add_u64=2.2.1.2 563:v_bitop3_b16 564:v_bitop3_b32 565:v_cvt_scalef32_pk_fp8_f32
        566:v_cvt_scalef32_pk_bf8_f32 567:v_cvt_scalef32_sr_fp8_f32 568:v_cvt_scalef32_sr_bf8_f32
        569:v_cvt_scalef32_pk_f32_fp8=2.1.1 570:v_cvt_scalef32_pk_f32_bf8=2.1.1
        571:v_cvt_scalef32_f32_fp8=1.1.1 572:v_cvt_scalef32_f32_bf8=1.1.1
        573:v_cvt_scalef32_pk_fp4_f32 574:v_cvt_scalef32_sr_pk_fp4_f32=1.2.1.1
        575:v_cvt_scalef32_pk_f32_fp4=2.1.1 576:v_cvt_scalef32_pk_fp8_f16=1.1.1
        577:v_cvt_scalef32_pk_bf8_f16=1.1.1 578:v_cvt_scalef32_sr_fp8_f16
        579:v_cvt_scalef32_sr_bf8_f16 580:v_cvt_scalef32_pk_fp8_bf16=1.1.1
        581:v_cvt_scalef32_pk_bf8_bf16=1.1.1 582:v_cvt_scalef32_sr_fp8_bf16
        583:v_cvt_scalef32_sr_bf8_bf16 584:v_cvt_scalef32_pk_f16_fp8=1.1.1
        585:v_cvt_scalef32_pk_f16_bf8=1.1.1 586:v_cvt_scalef32_f16_fp8=1.1.1
        587:v_cvt_scalef32_f16_bf8=1.1.1 588:v_cvt_scalef32_pk_fp4_f16=1.1.1
        589:v_cvt_scalef32_pk_fp4_bf16=1.1.1 590:v_cvt_scalef32_sr_pk_fp4_f16
        591:v_cvt_scalef32_sr_pk_fp4_bf16 592:v_cvt_scalef32_pk_f16_fp4=1.1.1
        593:v_cvt_scalef32_pk_bf16_fp4=1.1.1 594:v_cvt_scalef32_2xpk16_fp6_f32=6.16.16.1
        595:v_cvt_scalef32_2xpk16_bf6_f32=6.16.16.1 596:v_cvt_scalef32_sr_pk32_fp6_f32=6.32.1.1
        597:v_cvt_scalef32_sr_pk32_bf6_f32=6.32.1.1 598:v_cvt_scalef32_pk32_f32_fp6=32.6.1
        599:v_cvt_scalef32_pk32_f32_bf6=32.6.1 600:v_cvt_scalef32_pk32_fp6_f16=6.16.1
        601:v_cvt_scalef32_pk32_fp6_bf16=6.16.1 602:v_cvt_scalef32_pk32_bf6_f16=6.16.1
        603:v_cvt_scalef32_pk32_bf6_bf16=6.16.1 604:v_cvt_scalef32_sr_pk32_fp6_f16=6.16.1.1
        605:v_cvt_scalef32_sr_pk32_fp6_bf16=6.16.1.1 606:v_cvt_scalef32_sr_pk32_bf6_f16=6.16.1.1
        607:v_cvt_scalef32_sr_pk32_bf6_bf16=6.16.1.1 608:v_cvt_scalef32_pk32_f16_fp6=16.6.1
        609:v_cvt_scalef32_pk32_bf16_fp6=16.6.1 610:v_cvt_scalef32_pk32_f16_bf6=16.6.1
        611:v_cvt_scalef32_pk32_bf16_bf6=16.6.1 613:v_ashr_pk_i8_i32 614:v_ashr_pk_u8_i32
        615:v_cvt_pk_f16_f32=1.1.1 616:v_cvt_pk_bf16_f32=1.1.1 617:v_cvt_scalef32_pk_bf16_fp8=1.1.1
        618:v_cvt_scalef32_pk_bf16_bf8=1.1.1 640:v_add_f64=2.2.2 641:v_mul_f64=2.2.2
        642:v_min_f64=2.2.2 643:v_max_f64=2.2.2 644:v_ldexp_f64=2.2.1 645:v_mul_lo_u32=1.1.1
        646:v_mul_hi_u32=1.1.1 647:v_mul_hi_i32=1.1.1 648:v_ldexp_f32=1.1.1 649:v_readlane_b32=1.1.1
        650:v_writelane_b32=1.1.1 651:v_bcnt_u32_b32=1.1.1 652:v_mbcnt_lo_u32_b32=1.1.1
        653:v_mbcnt_hi_u32_b32=1.1.1 655:v_lshlrev_b64=2.1.2 656:v_lshrrev_b64=2.1.2
        657:v_ashrrev_i64=2.1.2 658:v_trig_preop_f64=2.2.1 659:v_bfm_b32=1.1.1
        660:v_cvt_pknorm_i16_f32=1.1.1 661:v_cvt_pknorm_u16_f32=1.1.1 662:v_cvt_pkrtz_f16_f32=1.1.1
        663:v_cvt_pk_u16_u32=1.1.1 664:v_cvt_pk_i16_i32=1.1.1 665:v_cvt_pknorm_i16_f16=1.1.1
        666:v_cvt_pknorm_u16_f16=1.1.1 668:v_add_i32=1.1.1 669:v_sub_i32=1.1.1 670:v_add_i16=1.1.1
        671:v_sub_i16=1.1.1 672:v_pack_b32_f16=1.1.1 673:v_mul_legacy_f32=1.1.1
        674:v_cvt_pk_fp8_f32=1.1.1 675:v_cvt_pk_bf8_f32=1.1.1 676:v_cvt_sr_fp8_f32=1.1.1
        677:v_cvt_sr_bf8_f32=1.1.1 678:v_cvt_sr_f16_f32=1.1.1 679:v_cvt_sr_bf16_f32=1.1.1
        680:v_minimum3_f32 681:v_maximum3_f32
    """,
    "VOP3SD": """
        281:v_add_co_u32=1.1.1 282:v_sub_co_u32=1.1.1 283:v_subrev_co_u32=1.1.1
        284:v_addc_co_u32=1.1.1.2 285:v_subb_co_u32=1.1.1.2 286:v_subbrev_co_u32=1.1.1.2
        480:v_div_scale_f32 481:v_div_scale_f64=2.2.2.2 488:v_mad_u64_u32=2.1.1.2
        489:v_mad_i64_i32=2.1.1.2
    """,
    "VOP3P": """
        0:v_pk_mad_i16 1:v_pk_mul_lo_u16=1.1.1 2:v_pk_add_i16=1.1.1 3:v_pk_sub_i16=1.1.1
        4:v_pk_lshlrev_b16=1.1.1 5:v_pk_lshrrev_b16=1.1.1 6:v_pk_ashrrev_i16=1.1.1
        7:v_pk_max_i16=1.1.1 8:v_pk_min_i16=1.1.1 9:v_pk_mad_u16 10:v_pk_add_u16=1.1.1
        11:v_pk_sub_u16=1.1.1 12:v_pk_max_u16=1.1.1 13:v_pk_min_u16=1.1.1 14:v_pk_fma_f16
        15:v_pk_add_f16=1.1.1 16:v_pk_mul_f16=1.1.1 17:v_pk_min_f16=1.1.1 18:v_pk_max_f16=1.1.1
        26:v_dot2_f32_bf16 27:v_pk_minimum3_f16 28:v_pk_maximum3_f16 32:v_fma_mix_f32
        33:v_fma_mixlo_f16 34:v_fma_mixhi_f16 35:v_dot2_f32_f16 38:v_dot2_i32_i16 39:v_dot2_u32_u16
        40:v_dot4_i32_i8 41:v_dot4_u32_u8 42:v_dot8_i32_i4 43:v_dot8_u32_u4 44:v_mfma_ld_scale_b32
        45:v_mfma_f32_16x16x128_f8f6f4=4.8.8.4 46:v_mfma_f32_32x32x64_f8f6f4=16.8.8.16
        48:v_pk_fma_f32=2.2.2.2 49:v_pk_mul_f32=2.2.2 50:v_pk_add_f32=2.2.2 51:v_pk_mov_b32=2.2.2
        53:v_mfma_f32_16x16x32_bf16=4.4.4.4 54:v_mfma_i32_16x16x64_i8=4.4.4.4
        55:v_mfma_f32_32x32x16_bf16=16.4.4.16 56:v_mfma_i32_32x32x32_i8=16.4.4.16
        57:v_smfmac_f32_16x16x64_bf16=4.4.8.1 58:v_smfmac_i32_16x16x128_i8=4.4.8.1
        59:v_smfmac_f32_16x16x128_bf8_bf8=4.4.8.1 60:v_smfmac_f32_16x16x128_bf8_fp8=4.4.8.1
        61:v_smfmac_f32_16x16x128_fp8_bf8=4.4.8.1 62:v_mfma_f32_16x16x8_xf32
        63:v_mfma_f32_32x32x4_xf32 64:v_mfma_f32_32x32x1_2b_f32=32.1.1.32
        65:v_mfma_f32_16x16x1_4b_f32=16.1.1.16 66:v_mfma_f32_4x4x1_16b_f32=4.1.1.4
        67:v_smfmac_f32_16x16x128_fp8_fp8=4.4.8.1 68:v_mfma_f32_32x32x2_f32=16.1.1.16
        69:v_mfma_f32_16x16x4_f32=4.1.1.4 70:v_smfmac_f32_32x32x32_bf16=16.4.8.1
        71:v_smfmac_i32_32x32x64_i8=16.4.8.1 72:v_mfma_f32_32x32x4_2b_f16=32.2.2.32
        73:v_mfma_f32_16x16x4_4b_f16=16.2.2.16 74:v_mfma_f32_4x4x4_16b_f16=4.2.2.4
        75:v_smfmac_f32_32x32x64_bf8_bf8=16.4.8.1 76:v_mfma_f32_32x32x8_f16=16.2.2.16
        77:v_mfma_f32_16x16x16_f16=4.2.2.4 78:v_smfmac_f32_32x32x64_bf8_fp8=16.4.8.1
        79:v_smfmac_f32_32x32x64_fp8_bf8=16.4.8.1 80:v_mfma_i32_32x32x4_2b_i8=32.1.1.32
        81:v_mfma_i32_16x16x4_4b_i8=16.1.1.16 82:v_mfma_i32_4x4x4_16b_i8=4.1.1.4
        83:v_smfmac_f32_32x32x64_fp8_fp8=16.4.8.1 84:v_mfma_f32_16x16x32_f16=4.4.4.4
        85:v_mfma_f32_32x32x16_f16=16.4.4.16 86:v_mfma_i32_32x32x16_i8=16.2.2.16
        87:v_mfma_i32_16x16x32_i8=4.2.2.4 88:v_accvgpr_read=1.1 89:v_accvgpr_write=1.1
        90:v_smfmac_f32_16x16x64_f16=4.4.8.1 91:v_smfmac_f32_32x32x32_f16=16.4.8.1
        93:v_mfma_f32_32x32x4_2b_bf16=32.2.2.32 94:v_mfma_f32_16x16x4_4b_bf16=16.2.2.16
        95:v_mfma_f32_4x4x4_16b_bf16=4.2.2.4 96:v_mfma_f32_32x32x8_bf16=16.2.2.16
        97:v_mfma_f32_16x16x16_bf16=4.2.2.4 98:v_smfmac_f32_16x16x32_f16=4.2.4.1
        100:v_smfmac_f32_32x32x16_f16=16.2.4.1 102:v_smfmac_f32_16x16x32_bf16=4.2.4.1
        104:v_smfmac_f32_32x32x16_bf16=16.2.4.1 106:v_smfmac_i32_16x16x64_i8=4.2.4.1
        108:v_smfmac_i32_32x32x32_i8=16.2.4.1 110:v_mfma_f64_16x16x4_f64=8.2.2.8
        111:v_mfma_f64_4x4x4_4b_f64=2.2.2.2 112:v_mfma_f32_16x16x32_bf8_bf8=4.2.2.4
        113:v_mfma_f32_16x16x32_bf8_fp8=4.2.2.4 114:v_mfma_f32_16x16x32_fp8_bf8=4.2.2.4
        115:v_mfma_f32_16x16x32_fp8_fp8=4.2.2.4 116:v_mfma_f32_32x32x16_bf8_bf8=16.2.2.16
        117:v_mfma_f32_32x32x16_bf8_fp8=16.2.2.16 118:v_mfma_f32_32x32x16_fp8_bf8=16.2.2.16
        119:v_mfma_f32_32x32x16_fp8_fp8=16.2.2.16 120:v_smfmac_f32_16x16x64_bf8_bf8=4.2.4.1
        121:v_smfmac_f32_16x16x64_bf8_fp8=4.2.4.1 122:v_smfmac_f32_16x16x64_fp8_bf8=4.2.4.1
        123:v_smfmac_f32_16x16x64_fp8_fp8=4.2.4.1 124:v_smfmac_f32_32x32x32_bf8_bf8=16.2.4.1
        125:v_smfmac_f32_32x32x32_bf8_fp8=16.2.4.1 126:v_smfmac_f32_32x32x32_fp8_bf8=16.2.4.1
        127:v_smfmac_f32_32x32x32_fp8_fp8=16.2.4.1
    """,
    "VOP3PX2": """
        45:v_mfma_scale_f32_16x16x128_f8f6f4=4.8.8.4 46:v_mfma_scale_f32_32x32x64_f8f6f4=16.8.8.16
    """,
}
