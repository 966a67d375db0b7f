// Experts from the router's logits, a token a warp: the order and the arithmetic of
// routing/triton_topk_kernels.py, to the same bits.
//
// Constants: LOGITS (their type; NONE if ids are given), LANE_EXPERTS (of a lane), SCORING,
// NORMALIZE, BIASED, CLAMP_NAN; NUM_GROUPS of experts (1: none), TOP_GROUPS of them that compete,
// BEST_OF_GROUP (experts whose scores add up to the group's, 1 or 2), GROUP_LANES (a power of two:
// lanes that share the experts of a group; 32 without groups).

#define SOFTMAX 0
#define SIGMOID 1
#define SQRTSOFTPLUS 2

constexpr int MOST_SLOTS = 16;  // of a token
constexpr bool IS_GROUPED = NUM_GROUPS > 1;
constexpr bool BY_SCORE = SCORING == SIGMOID || BIASED || IS_GROUPED;  // else logits are compared
static_assert(!CLAMP_NAN || SCORING != SOFTMAX || !BY_SCORE, "see chooses_experts");

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

// The value of such a number.
DEVICE float value_of(u32 rank) { return __uint_as_float(rank >> 31 ? rank & 0x7FFFFFFFu : ~rank); }

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

// Sum over the first WIDTH lanes of a warp, for each of them.
template <int WIDTH>
DEVICE float sum_of_lanes(float v) {
#pragma unroll
    for (int m = WIDTH / 2; m > 0; m /= 2) v += __shfl_xor_sync(ALL, v, m);
    return v;
}

// The highest value of a warp's lanes. NaN counts as -inf.
DEVICE float highest_of_lanes(float v) { return value_of(__reduce_max_sync(ALL, rank_of(v))); }

// The largest of some numbers.
template <int FIRST, int COUNT>
DEVICE u32 largest(const u32 *numbers) {
    if constexpr (COUNT == 1) {
        return numbers[FIRST];
    } else {
        constexpr int HALF = COUNT / 2;
        return max(largest<FIRST, HALF>(numbers), largest<FIRST + HALF, COUNT - HALF>(numbers));
    }
}

// What is chosen for a token. total: sum of all scores of a softmax, for a highest logit of 0; NaN
// where all its scores are lost. logits: of a softmax BY_SCORE less the highest, of all experts or,
// with NORMALIZE, of the chosen ones.
struct Chosen {
    int experts[TOP_K];
    float logits[TOP_K], total;
};

// Logits of one token. A lane has one of the first 32 experts, and each 32nd after it. With groups:
// one of the first GROUP_LANES experts of a group, and each GROUP_LANES-th after it in the group.
struct Router {
    const void *logits;
    size_t first;
    int num_experts;

    DEVICE float logit(int expert) const { return load_as<LOGITS>(logits, first + expert); }

    // Exclude experts outside of the best groups, of equal ones those with the lower number.
    DEVICE void limit_to_groups(u32 *ranks, int lane) const {
        u32 best = ranks[0], second = 0;
#pragma unroll
        for (int i = 1; i < LANE_EXPERTS; i++) {
            second = max(second, min(best, ranks[i]));
            best = max(best, ranks[i]);
        }
#pragma unroll
        for (int m = GROUP_LANES / 2; m > 0; m /= 2) {
            u32 other = __shfl_xor_sync(ALL, best, m);
            second = max(max(second, __shfl_xor_sync(ALL, second, m)), min(best, other));
            best = max(best, other);
        }
        if (BEST_OF_GROUP == 2) best = rank_of(value_of(best) + value_of(second));
        int group = lane / GROUP_LANES, better = 0;
#pragma unroll
        for (int other = 0; other < NUM_GROUPS; other++) {
            u32 rank = __shfl_sync(ALL, best, other * GROUP_LANES);
            better += rank > best || (rank == best && other < group);
        }
        if (better >= TOP_GROUPS)
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) ranks[i] = 0;
    }

    // Choose by keys, of which each takes one reduction: ranks whose last bits are the expert's.
    // False if experts that matter differ in these bits alone.
    DEVICE bool take_keys(const u32 *ranks, int first_expert, int &own, int lane) const {
        constexpr bool ARE_EXACT = LOGITS != F32 && !BY_SCORE;
        constexpr u32 LAST = 511;
        u32 keys[LANE_EXPERTS], last = 0;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++)
            keys[i] = ranks[i] == 0
                          ? 0
                          : (ranks[i] & ~LAST) | (LAST - (i * GROUP_LANES + first_expert));
        bool are_equal = false;
#pragma unroll 1
        for (int slot = 0; slot < TOP_K + !ARE_EXACT; slot++) {
            u32 best = __reduce_max_sync(ALL, largest<0, LANE_EXPERTS>(keys));
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++)
                if (keys[i] == best) keys[i] = 0;
            if (lane == slot) own = LAST - (best & LAST);
            are_equal |= (best ^ last) <= LAST;
            last = best;
        }
        return ARE_EXACT || !are_equal;
    }

    // Choose by ranks.
    DEVICE void take_ranks(u32 *ranks, int first_expert, int &own, int lane) const {
#pragma unroll 1
        for (int slot = 0; slot < TOP_K; slot++) {
            u32 best = __reduce_max_sync(ALL, largest<0, LANE_EXPERTS>(ranks)), found = ALL;
#pragma unroll
            for (int i = LANE_EXPERTS - 1; i >= 0; i--)
                if (ranks[i] == best) found = i * GROUP_LANES + first_expert;
            int expert = (int)__reduce_min_sync(ALL, found);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++)
                if (i * GROUP_LANES + first_expert == expert) ranks[i] = 0;
            if (lane == slot) own = expert;
        }
    }

    // The best experts in order, of equal ones that with the lower number.
    DEVICE void choose(const float *correction_bias, Chosen &chosen, int lane) const {
        u32 ranks[LANE_EXPERTS];
        float values[LANE_EXPERTS], biases[LANE_EXPERTS];
        int first_expert = lane, end = num_experts;
        if (IS_GROUPED) {
            int group = lane / GROUP_LANES, size = num_experts / NUM_GROUPS;
            first_expert = group * size + lane % GROUP_LANES;
            end = min((group + 1) * size, num_experts);
        }
        bool any_bad = false, any_good = false;
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
            int expert = i * GROUP_LANES + first_expert;
            bool inside = expert < end;
            values[i] = inside ? logit(expert) : -infinity();
            biases[i] = BIASED && inside ? correction_bias[expert] : 0.0f;
        }
        float highest = -infinity(), total = 0.0f;
        if (SCORING == SOFTMAX && BY_SCORE) {
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++) highest = fmaxf(highest, values[i]);
            highest = highest_of_lanes(highest);
            // Added up in the order of the Triton kernel.
#pragma unroll 1
            for (int expert = lane; expert < num_experts; expert += 32)
                total += exponential(logit(expert) - highest);
            total = sum_of_lanes<32>(total);
        }
#pragma unroll
        for (int i = 0; i < LANE_EXPERTS; i++) {
            float value = values[i];
            any_bad |= is_lost(value), any_good |= value > -infinity();
            if (BY_SCORE) {
                value = SCORING == SOFTMAX ? divide(exponential(value - highest), total)
                                           : score_of(value);
                if (CLAMP_NAN && is_lost(value)) value = 0.0f;
                value += biases[i];
            } else if (CLAMP_NAN && SCORING != SOFTMAX && is_lost(score_of(value))) {
                value = -infinity();
            }
            ranks[i] = i * GROUP_LANES + first_expert < end ? rank_of(value) : 0;
        }
        if (IS_GROUPED) limit_to_groups(ranks, lane);
        bool lost = CLAMP_NAN && SCORING == SOFTMAX &&
                    (__any_sync(ALL, any_bad) || !__any_sync(ALL, any_good));
        int own = lane;
        if (!lost && !take_keys(ranks, first_expert, own, lane))
            take_ranks(ranks, first_expert, own, lane);
        // Loaded again, now: later the loads would wait behind those of weights.
        float own_logit = lane < TOP_K ? logit(own) : 0.0f;
        if (SCORING == SOFTMAX && BY_SCORE) {
            if (NORMALIZE) highest = highest_of_lanes(lane < TOP_K ? own_logit : -infinity());
            own_logit -= highest;
        }
        if (lane < TOP_K) chosen.experts[lane] = own, chosen.logits[lane] = own_logit;
        if (SCORING == SOFTMAX && !BY_SCORE && !NORMALIZE) {
            highest = __shfl_sync(ALL, own_logit, 0);
#pragma unroll
            for (int i = 0; i < LANE_EXPERTS; i++)
                if (i * 32 + lane < num_experts) total += exponential(values[i] - highest);
            total = sum_of_lanes<32>(total);
        }
        if (lane == 0) chosen.total = lost ? not_a_number() : total;
        __syncwarp();
    }
};

// Routing weight of a slot, by a warp of which each lane has one. Slots repeat every TOP_K lanes.
DEVICE float weight_of(const Chosen &chosen, float scaling_factor, int slot) {
    int lane = threadIdx.x % 32;
    bool first = lane < TOP_K;
    float logit = chosen.logits[slot], weight;
    if (SCORING == SOFTMAX) {
        weight = exponential(BY_SCORE ? logit : logit - chosen.logits[0]);
        float sum = sum_of_lanes<MOST_SLOTS>(first ? weight : 0.0f);
        weight = divide(weight, NORMALIZE ? __shfl_sync(ALL, sum, 0) : chosen.total);
        if (CLAMP_NAN && chosen.total != chosen.total) weight = 0.0f;
    } else {
        weight = score_of(logit);
        if (CLAMP_NAN && is_lost(weight)) weight = 0.0f;
        float sum = sum_of_lanes<MOST_SLOTS>(first ? weight : 0.0f);
        if (NORMALIZE) weight = divide(weight, __shfl_sync(ALL, sum, 0) + 1e-20f);
    }
    return weight * scaling_factor;
}
