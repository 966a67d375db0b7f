// Weights of the layer for a few tokens: what a stage of the ring holds of them, their decoding,
// and products with an operand of eight columns.
//
// Layouts: HOPPER_FRAGMENT of moe/hopper/layout.py, with MXFP4 weights whose scales are folded into
// the codes (FOLDED), and HOPPER_GROUPS of group_layout.py, with a scale for each group of a row.
// There the sums of a group are multiplied by its scale.
//
// Constants: CODES, GROUP (codes that share a scale), SCALES (type of the scales; NONE: a byte, or
// with zero points a word), ROW_FACTORS (whether each row has a float32 factor), EXPONENT (of all
// rows where none has).

#define FOLDED 0
#define INT4 1
#define INT4_ZERO 2
#define NVFP4 3
#define MXFP8 4

// ---- A unit: 64 rows x 128 codes, with their scales. Rows have terms of their own beside units.

constexpr int UNIT = 128, UNIT_ROWS = 64;
constexpr int CODE_BYTES = CODES == MXFP8 ? 8192 : 4096;
constexpr int SCALE_SIZE = CODES == INT4_ZERO || SCALES == F32 ? 4 : SCALES == NONE ? 1 : 2;
constexpr int SCALE_BYTES = CODES == FOLDED ? 256 : UNIT / GROUP * UNIT_ROWS * SCALE_SIZE;
constexpr int ROW_BYTES = CODES == FOLDED ? UNIT_ROWS : ROW_FACTORS ? 4 * UNIT_ROWS : 0;

// Sums of a unit that have scales of their own. Each takes whole k32 steps.
constexpr int CHAINS = CODES == FOLDED || GROUP == UNIT ? 1 : GROUP == 64 ? 2 : 4;

// ---- Operands: cores of 8 columns x 16 bytes, one after the other along the depth.

constexpr int CORE = 128, OPERAND_BYTES = 8 * 128;
constexpr int DESCRIPTOR_STEP = OPERAND_BYTES >> 4, DESCRIPTOR_HIGH = (2 * CORE) >> 4;

// A k32 step has two groups of 16. A token's first halves of steps are in other columns than its
// second halves, with zeros beside them, so that one product gives the sums of both groups.
constexpr bool HALVES = GROUP == 16;

// Columns of a token: high and low parts, or every other column is not used, so that a thread has
// the products of one token.
constexpr int TOKEN_COLUMNS = HALVES ? 4 : ROWS == HI_LO || TOKENS <= 4 ? 2 : 1;

// Low word of an operand's descriptor.
DEVICE u32 descriptor(u32 at) { return (at & 0x3FFFF) >> 4 | (CORE >> 4) << 16; }

// Store four values at place k of a unit, for a token. Depth has the order of the weights, with
// FOLDED ones (q h t j) for the place (t q h j).
DEVICE void store_words(u32 unit, int k, int token, Words w) {
    if (CODES == FOLDED) {
        int t = k >> 5, q = k >> 3 & 3, h = k >> 2 & 1;
        u32 to = unit + (2 * q + h) * CORE + token * TOKEN_COLUMNS * 16 + t * 4;
        store_shared_4(to, w.hi);
        if (ROWS == HI_LO) store_shared_4(to + 16, w.lo);
        return;
    }
    u32 to = unit + (k >> 4) * CORE + token * TOKEN_COLUMNS * 16 + (k & 15), other = to;
    if (HALVES) to += (k >> 4 & 1) * 32, other += (~k >> 4 & 1) * 32;
    store_shared_4(to, w.hi);
    if (ROWS == HI_LO) store_shared_4(to + 16, w.lo);
    if (HALVES) store_shared_4(other, 0);
    if (HALVES && ROWS == HI_LO) store_shared_4(other + 16, 0);
}

// ---- FOLDED codes.

// e4m3 magnitudes of the eight e2m1 ones, for the shift that is this lane's number.
struct Table {
    u32 low, high;

    DEVICE explicit Table(int lane) {
        u32 by = lane * 0x08080808u;
        low = 0x6C686000u - (by & 0xFFFFFF00u), high = 0x7C787470u - by;
        if (lane >= 12 && lane < 15) low = 0x0C080400u >> (lane - 12);  // subnormal
        if (lane == 14) high = 0x0C080604u;
        if (lane > 14) low = high = 0;  // blocks of zeros, and memory that no copy has filled
        asm volatile("" : "+r"(low), "+r"(high));  // not to be computed again in the loops
    }
};

// 32 codes of a row and MX block: first and second halves of four k32 steps, every fourth word.
DEVICE void decode(uint4 words, u32 shift, const Table &table, u32 *a) {
    u32 low = __shfl_sync(ALL, table.low, shift), high = __shfl_sync(ALL, table.high, shift);
    const u32 all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int q = 0; q < 4; q++)
        asm("{ .reg .b32 m, n;\n"
            "and.b32 m, %2, 0x77777777;\n"
            "shr.u32 n, m, 16;\n"
            "prmt.b32 m, %3, %4, m;\n"
            "prmt.b32 n, %3, %4, n;\n"
            "lop3.b32 %0, %2, 0x80808080, m, 0xEA;\n"  // (word & signs) | magnitudes
            "shl.b32 m, %2, 4;\n"
            "lop3.b32 %1, m, 0x80808080, n, 0xEA; }"
            : "=&r"(a[4 * q]), "=&r"(a[4 * q + 2])
            : "r"(all[q]), "r"(low), "r"(high));
}

// ---- Codes with scales of groups: exact e4m3 numbers, of which EXPONENT undoes a power of two.
// The instructions are those of device/hopper_ptx.py. half: 0 for low nibbles.

DEVICE u32 decode_nibbles(u32 word, int half, u32 zeros) {
    if (CODES == NVFP4) {
        u32 n = half ? word : word << 4;
        return (n & 0x80808080u) | (n >> 2 & 0x1C1C1C1Cu);
    }
    u32 n = word >> 4 * half & 0x0F0F0F0Fu;
    if (CODES == INT4) return (n & 0x01010101u) * 0x81u + n;
    n = (n | 0x80808080u) - zeros;
    u32 s;
    asm("prmt.b32 %0, %1, %1, 0xBA98;" : "=r"(s) : "r"(n));  // 0xFF where the top bit is set
    return (n ^ (~s | 0x80808080u)) + (~s & 0x01010101u);
}

// Scales of a thread's even and odd row, as they are stored, of each chain.
struct Scales {
    u32 even[CHAINS], odd[CHAINS];  // SCALE_SIZE below 4: both are in `even`

    DEVICE void clear() {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) even[c] = odd[c] = 0;
    }
    DEVICE void load(u32 at) {
#pragma unroll
        for (int c = 0; c < CHAINS; c++) {
            u32 from = at + c * (HALVES ? 2 : 1) * UNIT_ROWS * SCALE_SIZE;
            if (SCALE_SIZE == 1) even[c] = load_shared_2(from);
            if (SCALE_SIZE >= 2) even[c] = load_shared_4(from);
            if (SCALE_SIZE == 4) odd[c] = load_shared_4(from + 4);
        }
    }
    DEVICE u32 bits(int c, int is_odd) const {
        if (SCALE_SIZE == 4) return is_odd ? odd[c] : even[c];
        return even[c] >> (is_odd ? 8 * SCALE_SIZE : 0) & ((1u << 8 * SCALE_SIZE % 32) - 1);
    }
    DEVICE float value(int c, int is_odd) const {
        u32 found = bits(c, is_odd);
        if (CODES == INT4_ZERO) return __uint_as_float(found & ~0x1FFFu);
        if (CODES == MXFP8) return __uint_as_float(found << 23);
        if (CODES == NVFP4) return from_f16(half_pair(found) & 0xFFFF);
        if (SCALES == F32) return __uint_as_float(found);
        return SCALES == BF16 ? from_bf16(found) : from_f16(found);
    }
    // Zero point of a k32 step, in each byte.
    DEVICE u32 zeros(int step, int is_odd) const {
        return CODES == INT4_ZERO ? (bits(step * CHAINS / 4, is_odd) & 0xFF) * 0x01010101u : 0;
    }
};

// A thread's codes of a unit, as they are stored, of an even and an odd row.
struct Codes {
    uint4 words[CODE_BYTES / 2048];
    Scales scales;
    u32 shifts;  // of FOLDED codes

    // scales_at: of the thread's even row.
    DEVICE void load(u32 codes_at, u32 scales_at) {
        if (CODES == FOLDED) shifts = load_shared_2(scales_at);
        else scales.load(scales_at);
#pragma unroll
        for (int i = 0; i < CODE_BYTES / 2048; i++) words[i] = load_shared_16(codes_at + 2048 * i);
    }
    // Zeros, of a unit that no copy fills.
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < CODE_BYTES / 2048; i++) words[i] = make_uint4(0, 0, 0, 0);
        scales.clear();
    }
    // Operand A of four k32 steps. nothing: 0, which ptxas must not know. Otherwise it would load
    // MXFP8 codes to the registers of operand A while the products of the last stage read them.
    DEVICE void decode_to(u32 *a, const Table &table, u32 nothing) const {
        if (CODES == FOLDED) {
            decode(words[0], shifts & 0xFF, table, a);
            decode(words[1], shifts >> 8, table, a + 1);
            return;
        }
#pragma unroll
        for (int row = 0; row < 2; row++)
#pragma unroll
            for (int q = 0; q < 4; q++) {
                if (CODES == MXFP8) {
                    uint4 own = words[q / 2 * 2 + row];
                    a[4 * q + row] = (q % 2 ? own.z : own.x) | nothing;
                    a[4 * q + 2 + row] = (q % 2 ? own.w : own.y) | nothing;
                    continue;
                }
                uint4 own = words[row];
                u32 word = q == 0 ? own.x : q == 1 ? own.y : q == 2 ? own.z : own.w;
                a[4 * q + row] = decode_nibbles(word, 0, scales.zeros(q, row));
                a[4 * q + 2 + row] = decode_nibbles(word, 1, scales.zeros(q, row));
            }
    }
};

// Terms of a thread's even and odd row.
struct RowTerms {
    u32 references;  // of FOLDED codes
    float2 factors;

    DEVICE void load(u32 at) {
        if (CODES == FOLDED) references = load_shared_2(at);
        else if (ROW_FACTORS) factors = load_shared_8(at);
    }
    DEVICE float even() const {
        if (CODES == FOLDED) return power((int)(references & 0xFF) - 6);  // 2^(reference - 133)
        return ROW_FACTORS ? factors.x : power(127 + EXPONENT);
    }
    DEVICE float odd() const {
        if (CODES == FOLDED) return power((int)(references >> 8) - 6);
        return ROW_FACTORS ? factors.y : power(127 + EXPONENT);
    }
};

// ---- Products of a unit with an operand of eight columns.

struct Products {
    float d[4];  // two rows x two columns
    float chains[CHAINS][4];  // the same, of codes without their scales; not of FOLDED codes
    u32 a[16];
    Scales scales;

    DEVICE Products() {
#pragma unroll
        for (int i = 0; i < 16; i++) a[i] = 0;
        clear();
    }
    DEVICE void clear() {
        d[0] = d[1] = d[2] = d[3] = 0.0f;
        if (CODES == FOLDED) return;
#pragma unroll
        for (int c = 0; c < CHAINS; c++)
            chains[c][0] = chains[c][1] = chains[c][2] = chains[c][3] = 0.0f;
        scales.clear();
    }

    // Start them: `a` is multiplied by an operand.
    DEVICE void start(u32 operand) {
#define PRODUCT(sums, codes, at, high, step, more)                         \
    "add.u32 at, %" at ", " step "; mov.b64 b, {at, %" high "};\n"         \
    "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {" sums "}, {" codes "}, b, " more \
    ", 1, 1;\n"
#define PRODUCTS(...)                                                       \
    asm volatile("{ .reg .b32 at; .reg .b64 b; wgmma.fence.sync.aligned;\n" \
                 __VA_ARGS__ "wgmma.commit_group.sync.aligned; }\n"
#define INPUTS                                                                              \
    "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(a[4]), "r"(a[5]), "r"(a[6]), "r"(a[7]), \
        "r"(a[8]), "r"(a[9]), "r"(a[10]), "r"(a[11]), "r"(a[12]), "r"(a[13]), "r"(a[14]),   \
        "r"(a[15]), "r"(operand), "n"(DESCRIPTOR_HIGH)
#define SUMS(c) "=&f"(c[0]), "=&f"(c[1]), "=&f"(c[2]), "=&f"(c[3])
        if constexpr (CHAINS == 1) {
            float *sums = CODES == FOLDED ? d : chains[0];
            PRODUCTS(PRODUCT("%0, %1, %2, %3", "%4, %5, %6, %7", "20", "21", "0", "0")
                     PRODUCT("%0, %1, %2, %3", "%8, %9, %10, %11", "20", "21", "16", "1")
                     PRODUCT("%0, %1, %2, %3", "%12, %13, %14, %15", "20", "21", "32", "1")
                     PRODUCT("%0, %1, %2, %3", "%16, %17, %18, %19", "20", "21", "48", "1"))
                : SUMS(sums) : INPUTS : "memory");
        } else if constexpr (CHAINS == 2) {
            PRODUCTS(PRODUCT("%0, %1, %2, %3", "%8, %9, %10, %11", "24", "25", "0", "0")
                     PRODUCT("%0, %1, %2, %3", "%12, %13, %14, %15", "24", "25", "16", "1")
                     PRODUCT("%4, %5, %6, %7", "%16, %17, %18, %19", "24", "25", "32", "0")
                     PRODUCT("%4, %5, %6, %7", "%20, %21, %22, %23", "24", "25", "48", "1"))
                : SUMS(chains[0]), SUMS(chains[1]) : INPUTS : "memory");
        } else {
            PRODUCTS(PRODUCT("%0, %1, %2, %3", "%16, %17, %18, %19", "32", "33", "0", "0")
                     PRODUCT("%4, %5, %6, %7", "%20, %21, %22, %23", "32", "33", "16", "0")
                     PRODUCT("%8, %9, %10, %11", "%24, %25, %26, %27", "32", "33", "32", "0")
                     PRODUCT("%12, %13, %14, %15", "%28, %29, %30, %31", "32", "33", "48", "0"))
                : SUMS(chains[0]), SUMS(chains[1]), SUMS(chains[2]), SUMS(chains[3])
                : INPUTS : "memory");
        }
#undef PRODUCT
#undef PRODUCTS
#undef INPUTS
#undef SUMS
    }
    // Wait for them. `a` stays in its registers until then: ptxas before 13.3 would use them again.
    DEVICE void finish() {
#define CODES_HELD                                                                              \
    "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]),         \
        "+r"(a[7]), "+r"(a[8]), "+r"(a[9]), "+r"(a[10]), "+r"(a[11]), "+r"(a[12]), "+r"(a[13]), \
        "+r"(a[14]), "+r"(a[15])
#define SUMS(c) "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define WAIT "wgmma.wait_group.sync.aligned 0;\n"
        if constexpr (CODES == FOLDED) {
            asm volatile(WAIT : SUMS(d), CODES_HELD::"memory");
            return;
        }
        if constexpr (CHAINS == 1) asm volatile(WAIT : SUMS(chains[0]), CODES_HELD::"memory");
        if constexpr (CHAINS == 2)
            asm volatile(WAIT : SUMS(chains[0]), SUMS(chains[1]), CODES_HELD::"memory");
        if constexpr (CHAINS == 4)
            asm volatile(WAIT : SUMS(chains[0]), SUMS(chains[1]), SUMS(chains[2]),
                         SUMS(chains[3]), CODES_HELD::"memory");
#undef CODES_HELD
#undef SUMS
#undef WAIT
#pragma unroll
        for (int j = 0; j < 4; j++) {
            d[j] = 0.0f;
#pragma unroll
            for (int c = 0; c < CHAINS; c++) d[j] += chains[c][j] * scales.value(c, j / 2);
        }
    }
};
