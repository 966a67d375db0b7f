"""Instructions of all kinds as texts, and whether a decoded word is what its text says."""

from __future__ import annotations

from gfx950emu.program import Instruction

FORMS = """
buffer_atomic_add_f32 v0, v20, s[20:23], 0 offen
buffer_atomic_pk_add_bf16 v0, v20, s[20:23], s4 offen offset:16
buffer_load_ushort v20, v12, s[8:11], 0 offen
buffer_load_dwordx4 v12, s[8:11], 0 offen offset:64 lds
buffer_load_dwordx4 v[0:3], v12, s[8:11], 0 offen sc0 nt
ds_read2st64_b64 v[8:11], v4 offset1:2
ds_read_b64_tr_b8 v[98:99], v78 offset:16384
ds_read_b64_tr_b4 v[98:99], v78
ds_read_b96 v[22:24], v12 offset:16
ds_write_b8_d16_hi v22, v12 offset:16
global_atomic_add_f32 v[18:19], v41, off
global_atomic_add v2, v[18:19], v41, off sc0
global_atomic_pk_add_bf16 v18, v41, s[2:3]
global_load_dwordx2 v[2:3], v153, s[16:17] nt
global_load_lds_dword v[2:3], off
global_load_lds_dwordx4 v[2:3], off offset:16
global_load_ubyte v5, v[2:3], off offset:-8
global_store_byte v[0:1], v5, off
global_store_dword v0, v1, s[0:1]
global_store_dwordx4 v[4:5], v[0:3], off
global_store_short v[4:5], v0, off nt
s_andn2_b32 s51, s51, 31
s_andn2_saveexec_b64 s[0:1], s[0:1]
s_ashr_i64 s[0:1], s[0:1], 19
s_bfe_u32 s35, s2, 0x30006
s_bitcmp0_b32 s19, 7
s_bitcmp1_b32 s19, s4
s_brev_b32 s30, -2
s_cmp_gt_u32 s18, 3
s_cmp_lg_u64 s[18:19], 0
s_cmp_lt_u32 s18, 3
s_cmpk_gt_i32 s0, 0x100
s_cmpk_lt_i32 s0, 0x100
s_cmpk_lt_u32 s31, 0x120
s_lshl1_add_u32 s0, s44, s16
s_lshl2_add_u32 s0, s44, s16
s_lshl3_add_u32 s0, s44, s16
s_mul_hi_i32 s6, s34, s9
s_mulk_i32 s17, 0xfa00
s_not_b64 s[62:63], s[40:41]
s_or_saveexec_b64 s[24:25], s[4:5]
s_setprio 3
s_sub_u32 s8, vcc_lo, s8
s_subb_u32 s9, vcc_hi, s9
s_xor_b64 s[4:5], exec, s[6:7]
v_accvgpr_mov_b32 a16, a0
v_add_u16_e32 v2, -2, v15
v_cmp_ge_f32_e32 vcc, s10, v14
v_cmp_le_f32_e64 s[4:5], |v19|, -s10
v_cmp_lt_f32_e32 vcc, s17, v11
v_cmp_lt_i16_sdwa s[4:5], sext(v1), v2 src0_sel:BYTE_1 src1_sel:DWORD
v_cvt_scalef32_pk_bf16_fp8 v141, v39, v153 op_sel:[1,0,0]
v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4 op_sel:[0,0,1,1]
v_fmamk_f32 v0, v1, 0x3f000001, v2
v_fmaak_f32 v0, v1, v2, 0x3f000001
v_lshlrev_b64 v[4:5], 2, v[0:1]
v_mad_i64_i32 v[2:3], s[22:23], v10, s15, v[2:3]
v_mad_u32_u24 v18, v1, 56, v55
v_max3_f32 v11, v11, -v13, |v14|
v_max3_i32 v1, v1, v23, v29
v_max_u16_sdwa v191, v221, v182 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:DWORD
v_mfma_f32_16x16x32_f16 v[0:3], v[4:7], a[8:11], 0
v_mfma_f32_32x32x16_fp8_bf8 a[0:15], v[4:5], v[6:7], a[0:15]
v_min3_i32 v1, v1, v23, v29
v_min_u32_e32 v1, s18, v18
v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[4:7], v[8:15], a[0:3] cbsz:4 blgp:1
v_mov_b32_dpp v1, v2 row_half_mirror row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v1, v2 row_newbcast:5 row_mask:0x3 bank_mask:0xf bound_ctrl:1
v_mov_b32_dpp v1, v2 wave_shl:1 row_mask:0xf bank_mask:0xf
v_mov_b32_dpp v1, v2 wave_ror:1 row_mask:0xf bank_mask:0xf
v_mov_b64_e32 v[10:11], s[0:1]
v_mul_f32_e64 v1, v2, -2.0 clamp
v_mul_i32_i24_e32 v0, -12, v41
v_pack_b32_f16 v0, v1, v2
v_permlane16_swap_b32_e32 v0, v1
v_pk_add_f32 v[0:1], v[2:3], 1.0 op_sel_hi:[1,0] neg_lo:[1,0] neg_hi:[1,0]
v_pk_add_u16 v0, v1, v2
v_pk_lshlrev_b16 v84, 7, v85 op_sel_hi:[0,1]
v_pk_max_u16 v95, v84, 64 op_sel_hi:[1,0]
v_pk_mov_b32 v[42:43], v[24:25], v[22:23] op_sel:[1,0]
v_sub_co_u32_e64 v22, s[24:25], v0, v2
v_subb_co_u32_e64 v23, s[24:25], v1, v3, s[24:25]
v_subrev_f32_e32 v8, s7, v12
v_trunc_f32_e32 v8, v1
v_writelane_b32 v194, s19, 0
v_add_f64 v[0:1], -v[2:3], 1.0
v_cmp_class_f64_e64 s[0:1], v[2:3], s26
v_cvt_i32_f64_e32 v17, v[6:7]
v_fma_f16 v8, v1, -v2, v3 op_sel:[1,0,0,1]
v_fma_f64 v[20:21], -v[8:9], |v[12:13]|, 1.0
v_fma_mix_f32 v1, -v2, |v3|, v4 op_sel:[1,0,0] op_sel_hi:[1,0,1]
v_fma_mixhi_f16 v1, v2, s8, -|v4| op_sel_hi:[1,0,0]
v_fmac_f64_e32 v[0:1], 0xc1f00000, v[4:5]
v_ldexp_f64 v[8:9], v[8:9], v17
v_mfma_i32_16x16x64_i8 a[0:3], v[4:7], v[8:11], a[0:3]
v_pk_fma_f16 v0, v1, v2, v3 op_sel:[0,1,0] op_sel_hi:[1,0,1] neg_lo:[0,0,1] neg_hi:[0,0,1]
v_rsq_f16_e32 v2, v2
"""
"""Instructions of other kernels and of rarer modifiers, as compilers emit them.

An unscaled f8f6f4 follows one of 4 bytes: after 8 bytes tinygrad takes both for a scaled one."""


def differs(read: Instruction, written: Instruction) -> bool:
    """Whether the decoded word is not what the text says. Texts may leave out the suffix e32."""
    forms = {"": "e32", **dict.fromkeys(("e32", "e64", "dpp", "sdwa"))}
    return (
        read.name != written.name
        or read.operands != written.operands
        or dict(read.modifiers) != dict(written.modifiers)
        or read.target != written.target
        or written.encoding not in (read.encoding, forms.get(read.encoding), "")
    )
