// Experts from the router's logits, a token a warp: the order and the arithmetic of
// routing/triton_topk_kernels.py, to the same bits.
//
// Constants: LOGITS (their type; NONE if ids are given), LANE_EXPERTS (of a lane), SCORING,
// NORMALIZE, BIASED, CLAMP_NAN.

#define SOFTMAX 0
#define SIGMOID 1
#define SQRTSOFTPLUS 2

constexpr int MOST_SLOTS = 16;  // of a token

DEVICE float infinity() { return __uint_as_float(0x7F800000u); }

// The instructions that Triton has for exp, / and sqrt.
DEVICE float exponential(float x) {
    float v;
    asm("ex2.approx.f32 %0, %1;" : "=f"(v) : "f"(x * 1.4426950408889634f));
    return v;
}

DEVICE float divide(float a, float b) {
    float v;
    asm("div.full.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
    return v;
}

DEVICE float root(float x) {
    float v;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(v) : "f"(x));
    return v;
}

// A number with the order of the value. NaN counts as -inf, -0 as 0; 0 is below all of them.
DEVICE u32 rank_of(float v) {
    if (v != v) v = -infinity();
    u32 bits = v == 0.0f ? 0 : __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Score of a logit alone.
DEVICE float score_of(float logit) {
    if (SCORING == SIGMOID) return divide(1.0f, 1.0f + exponential(-logit));
    float raised = exponential(fminf(logit, 20.0f)), total = 1.0f + raised;
    // log(1 + raised) to the last bits: the log of the rounded total, corrected for its rounding.
    float exact = total == 1.0f ? raised : logf(total) * divide(raised, total - 1.0f);
    return root(logit > 20.0f || logit != logit ? logit : exact);
}

// Whether a score, or a logit of a softmax, is NaN or too large.
DEVICE bool is_lost(float v) { return !(v < infinity()); }

// Sum over the lanes of a warp, of which those from `width` on have zeros.
template <int WIDTH>
DEVICE float sum_of_lanes(float v) {
#pragma unroll
    for (int m = WIDTH / 2; m > 0; m /= 2) v += __shfl_xor_sync(ALL, v, m);
    return v;
}

// Router's logits of one token.
struct Router {
    const void *logits;
    size_t first;
    int num_experts, top_k;

    DEVICE float logit(int expert) const { return load_as<LOGITS>(logits, first + expert); }

    // Expert of slot `lane`, the best first, of equal ones that with the lowest number. lost:
    // whether all scores of a softmax are.
    DEVICE int choose(const float *correction_bias, int lane, bool &lost) const {
        u32 ranks[LANE_EXPERTS];
        float values[LANE_EXPERTS], biases[LANE_EXPERTS];
        bool any_bad = false, any_good = false;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
            int expert = i * 32 + lane;
            bool inside = expert < num_experts;
            values[i] = inside ? logit(expert) : -infinity();
            biases[i] = BIASED && inside ? correction_bias[expert] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
            float value = values[i];
            any_bad |= is_lost(value), any_good |= value > -infinity();
            // Softmax and sqrtsoftplus order logits, unless a bias is added to the score.
            if (SCORING == SIGMOID || BIASED) {
                value = score_of(value);
                if (CLAMP_NAN && is_lost(value)) value = 0.0f;
                value += biases[i];
            } else if (CLAMP_NAN && SCORING != SOFTMAX && is_lost(score_of(value))) {
                value = -infinity();
            }
            ranks[i] = i * 32 + lane < num_experts ? rank_of(value) : 0;
        }
        lost = false;
        if (CLAMP_NAN && SCORING == SOFTMAX)
            lost = __any_sync(ALL, any_bad) || !__any_sync(ALL, any_good);
        if (lost)
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) ranks[i] = i * 32 + lane < num_experts;
        int chosen = 0;
        for (int slot = 0; slot < top_k; slot++) {
            u32 own = 0;
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) own = max(own, ranks[i]);
            u32 best = __reduce_max_sync(ALL, own), found = ALL;
#pragma unroll
            for (int i = LANE_EXPERTS - 1; i >= 0; i--)
                if (ranks[i] == best) found = i * 32 + lane;
            int expert = (int)__reduce_min_sync(ALL, found);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++)
                if (i * 32 + lane == expert) ranks[i] = 0;
            if (lane == slot) chosen = expert;
        }
        return chosen;
    }

    // Routing weight of slot `lane`, whose expert was chosen.
    DEVICE float weigh(int expert, bool lost, float scaling_factor, int lane) const {
        bool filled = lane < top_k;
        float own = filled ? logit(expert) : 0.0f, weight = 0.0f;
        if (SCORING != SOFTMAX) {
            if (filled) weight = score_of(own);
            if (CLAMP_NAN && is_lost(weight)) weight = 0.0f;
            if (NORMALIZE) weight = divide(weight, sum_of_lanes<MOST_SLOTS>(weight) + 1e-20f);
            return weight * scaling_factor;
        }
        float largest = __shfl_sync(ALL, own, 0), total = 0.0f;
        if (filled) weight = exponential(own - largest);
        if (NORMALIZE) {
            total = sum_of_lanes<MOST_SLOTS>(weight);
        } else {
            for (int i = lane; i < num_experts; i += 32) total += exponential(logit(i) - largest);
            total = sum_of_lanes<32>(total);
        }
        weight = divide(weight, total);
        return (CLAMP_NAN && lost ? 0.0f : weight) * scaling_factor;
    }
};
