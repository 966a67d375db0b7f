// Device functions of the layer for a few tokens: PTX, numbers, rows, activations.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Values of ROWS, of types and of ACTIVATION; few_tokens.py has the same numbers.
#define HI_LO 0
#define E4M3 1
#define E2M1 2
#define NONE 0
#define BF16 1
#define F16 2
#define F32 3
#define SILU 0
#define SWIGLU 1
#define GELU 2
#define GELU_TANH 3
#define CLAMPED_SILU 4
#define SITU_V2 5

#define DEVICE __device__ __forceinline__

constexpr u32 ALL = 0xFFFFFFFFu;  // lanes of a warp

// ---- Barriers, copies, shared memory.

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(const u64 *barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(count));
}

// Arrive, and expect bytes of copies.
DEVICE void expect(const u64 *barrier, int bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
}

DEVICE void arrive(const u64 *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

DEVICE void wait(const u64 *barrier, int phase) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(barrier)),
        "r"(phase)
        : "memory");
}

template <int ID, int COUNT>
DEVICE void sync_threads() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// As `sync_threads`, without waiting: what this warp has stored is there for those that wait.
template <int ID, int COUNT>
DEVICE void signal_threads() {
    __syncwarp();
    __threadfence_block();
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// Weights are read once: they need not stay in L2.
DEVICE u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

DEVICE void copy(u32 to, const u8 *from, int bytes, const u64 *barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
        : "memory");
}

DEVICE uint4 load_shared_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

DEVICE u32 load_shared_2(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

DEVICE u32 load_shared_4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

DEVICE float2 load_shared_8(u32 at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

DEVICE void store_shared_4(u32 at, u32 v) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// What this thread has stored is there for wgmma.
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Words that CTAs exchange: 32 bits of a value, and above them the number of the launch.

DEVICE u64 word(u32 value, int launch) { return (u64)(u32)launch << 32 | value; }

DEVICE void publish(u64 *to, u32 value, int launch) {
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word(value, launch))
                 : "memory");
}

DEVICE void publish(u64 *to, float first, float second, int launch) {
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to),
                 "l"(word(__float_as_uint(first), launch)),
                 "l"(word(__float_as_uint(second), launch))
                 : "memory");
}

struct Pair {
    u64 first, second;

    DEVICE void load(const u64 *from) {
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(first), "=l"(second)
                     : "l"(from)
                     : "memory");
    }
    // Load until both are of this launch.
    DEVICE void await(const u64 *from, int launch) {
        while ((u32)(first >> 32) != (u32)launch || (u32)(second >> 32) != (u32)launch) load(from);
    }
};

// ---- Numbers.

// 2^(byte - 127), for bytes 1 to 254.
DEVICE float power(int byte) { return __uint_as_float((u32)byte << 23); }

DEVICE float not_a_number() { return __uint_as_float(0x7FC00000u); }

DEVICE u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

DEVICE float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

DEVICE u32 to_bf16(float v) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

DEVICE float from_f16(u32 bits) {
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((u16)bits));
    return v;
}

DEVICE u32 to_f16(float v) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}

template <int TYPE>
DEVICE float load_as(const void *p, size_t i) {
    if (TYPE == F32) return ((const float *)p)[i];
    u32 bits = ((const u16 *)p)[i];
    return TYPE == BF16 ? from_bf16(bits) : from_f16(bits);
}

// Two values to e4m3 codes, saturating; the first is in the low byte.
DEVICE u32 e4m3_pair(float low, float high) {
    u16 codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

DEVICE u32 half_pair(u32 codes) {
    u32 v;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(v) : "h"((u16)codes));
    return v;
}

// Two e4m3 codes times a power of two of at most 1: exact in float16 (`scaled_words` of
// device/hopper_ptx.py).
DEVICE u32 scaled_pair(u32 codes, float factor) {
    u32 v = half_pair(codes), half;
    u16 found;
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(half) : "f"(factor));
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(v) : "r"(half));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(found) : "r"(v));
    return found;
}

// The nearest e2m1 value, ties to even, saturating (`_round_to_e2m1` of encode.py).
DEVICE float rounded_e2m1(float v) {
    float size = fminf(fabsf(v), 6.0f);
    u32 binade = max(__float_as_uint(size) & 0x7F800000u, 127u << 23);
    float offset = __uint_as_float(binade + (22u << 23));
    u32 rounded = __float_as_uint(__fsub_rn(__fadd_rn(size, offset), offset));
    return __uint_as_float(rounded | (__float_as_uint(v) & 0x80000000u));
}

DEVICE float e2m1_value(u32 code) {
    u32 size = code & 7, normal = ((size >> 1) + 126) << 23 | (size & 1) << 22;
    return __uint_as_float((size > 1 ? normal : size * 0x3F000000u) | (code & 8) << 28);
}

// ---- Rows: the arithmetic of moe/hopper/encode.py.

constexpr int HEADROOM = ROWS == E2M1 ? 6 : 0;

// E8M0 byte of a block, by the bits of its largest magnitude.
DEVICE int block_scale(u32 largest) {
    if (largest >= 0x7F800000u) return 255;
    return largest == 0 ? 127 : max((int)((largest + (0x800000u - THRESHOLD)) >> 23) - EMAX, 0);
}

// Largest magnitude of a block of 32 values, four of which each of eight lanes has.
DEVICE u32 block_maximum(u32 largest) {
#pragma unroll
    for (int m = 1; m < 8; m *= 2) largest = max(largest, __shfl_xor_sync(ALL, largest, m));
    return largest;
}

// How a row is encoded. inverse: of HI_LO. base: the row's scale byte, of MX rows.
struct Encoding {
    float scale, inverse;
    int base;

    // statistic: the largest magnitude of a row (HI_LO), or the largest scale of its blocks.
    DEVICE explicit Encoding(u32 statistic) {
        if (ROWS == HI_LO) {
            int exponent = (int)(statistic >> 23) - 8 + ((statistic & 0x7FFFFFu) > 0x600000u);
            exponent = min(max(exponent, 1), 253);
            scale = statistic >= 0x7F800000u ? not_a_number() : power(exponent);
            inverse = power(254 - exponent);
        } else {
            base = max((int)statistic, 1 + HEADROOM);
            scale = statistic == 255 ? not_a_number() : power(base - HEADROOM);
        }
    }
    // What multiplies the codes of a block with this scale.
    DEVICE float factor(int block) const {
        return power(min(max(127 + HEADROOM + block - base, 1), 127 + HEADROOM));
    }
};

// Four e4m3 codes; lo: of HI_LO.
struct Words {
    u32 hi, lo;
};

// Four values of a row; block: the scale of their MX block.
DEVICE Words encode(const float *v, const Encoding &row, int block) {
    Words w = {0, 0};
    float inverse = block >= 254 ? __uint_as_float(1u << 22) : power(254 - block);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a = v[2 * i], b = v[2 * i + 1];
        u32 codes;
        if (ROWS == HI_LO) {
            a *= row.inverse, b *= row.inverse;
            codes = e4m3_pair(a, b);
            u32 back = half_pair(codes);
            float low = (a - from_f16(back & 0xFFFF)) * 16.0f;
            w.lo |= e4m3_pair(low, (b - from_f16(back >> 16)) * 16.0f) << (16 * i);
        } else if (ROWS == E2M1) {
            float factor = row.factor(block);
            codes = e4m3_pair(rounded_e2m1(a * inverse) * factor,
                              rounded_e2m1(b * inverse) * factor);
        } else {
            codes = scaled_pair(e4m3_pair(a * inverse, b * inverse), row.factor(block));
        }
        w.hi |= codes << (16 * i);
    }
    return w;
}

// Four MX codes of a row.
DEVICE Words encode_codes(u32 codes, const Encoding &row, int block) {
    float factor = row.factor(block);
    Words w = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float a = e2m1_value(codes >> (8 * i)), b = e2m1_value(codes >> (8 * i + 4));
        u32 pair = ROWS == E2M1 ? e4m3_pair(a * factor, b * factor)
                                : scaled_pair(codes >> (16 * i) & 0xFFFF, factor);
        w.hi |= pair << (16 * i);
    }
    return w;
}

// ---- Activations: those of device/activation.py. NaN stays NaN.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

DEVICE float tangent(float x) {
    float s = x * x, decay = __expf(-2.0f * fabsf(x)), size = (1.0f - decay) / (1.0f + decay);
    float tail = -1.0f / 3 + s * (2.0f / 15 + s * (-17.0f / 315 + s * (62.0f / 2835)));
    return s < 0.0625f ? x * (1.0f + s * tail) : x < 0.0f ? -size : size;
}

DEVICE float clamp_above(float x, float limit) { return x > limit ? limit : x; }

DEVICE float clamp_both(float x, float limit) {
    return x < -limit ? -limit : clamp_above(x, limit);
}

DEVICE float activate(float gate, float up, float p0, float p1, float p2) {
    if (ACTIVATION == SILU) return gate * sigmoid(gate) * up;
    if (ACTIVATION == SWIGLU) {  // p0 alpha, p1 limit, p2 beta
        gate = clamp_above(gate, p1);
        return gate * sigmoid(p0 * gate) * (clamp_both(up, p1) + p2);
    }
    if (ACTIVATION == GELU) return 0.5f * gate * (1.0f + erff(gate * 0.7071067811865476f)) * up;
    if (ACTIVATION == GELU_TANH)
        return gate * sigmoid(1.5957691216057308f * (gate + 0.044715f * gate * gate * gate)) * up;
    if (ACTIVATION == CLAMPED_SILU) {  // p0 limit
        gate = clamp_above(gate, p0);
        return gate * sigmoid(gate) * clamp_both(up, p0);
    }
    // SITU_V2: p0 beta, p1 beta_up
    return p0 * tangent(gate / p0) * sigmoid(gate) * (p1 * tangent(up / p1));
}
