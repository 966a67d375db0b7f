// A whole MoE layer for a few tokens in one launch: from the router's logits, or from expert ids,
// to combined outputs.
//
// Such a layer takes the time to read the weights of the experts that the tokens hit. So nothing
// here waits for another launch, and weights are read all the time.
//
// Stage 1: its unit is 64 gate and up rows of one hit expert, 32 features, and the whole depth.
// Each CTA takes a run of units, applies the activation and publishes the features.
//
// Stage 2: its item is 128 features of one hit expert. A team of four CTAs takes a run of items,
// and each of the four a quarter of the rows, so that sums over items stay in registers. The items'
// features come from a few CTAs, mostly of the team, and the ring is full of weights when they
// arrive. Sums of teams meet at the end and are added in the order of teams: results have the same
// bits always.
//
// Features and sums travel as value and number of the launch in one 8-byte store; a reader loads
// until it finds the number. Nothing has to be cleared. All CTAs must be resident, since each waits
// for others: the launch is cooperative.
//
// Roles: 20 warps, one CTA an SM.
//     consumers: 16 warps in four warpgroups. They encode x, multiply, and add up outputs.
//     producer: 1 warp. It works out which experts are hit and copies weights to the ring.
//     activation: 1 warp, a feature a lane. It lists experts and weights for all others first.
//     encoders: 2 warps. They collect and encode features: each those of half of the tokens, or of
//         up to two tokens every other item.
//     routers: these four warps at first, a token each, where logits are given.
//
// Barriers: two mbarriers a stage, and named ones.
//     ready: 1 arrival, by the producer with the number of bytes of a stage.
//     free: 16 arrivals, by the consumers' warps when their products have been started.
//     sums_full: 16 arrivals, by the consumers' warps. sums_free: 1, by the activation warp. Of two
//         buffers, whose phase follows from the number of the unit.
//     encoded: 1 arrival by each encoder that has tokens. Of each item, once.
//     TABLES: all but the producer. The routing is known and x is encoded.
//     ENCODE: the consumers, while they encode x, and when they add up outputs.
//     END: the consumers and an encoder, which has listed the teams by then.
//     CHOSEN: the routers. Experts of all tokens are known.
//
// Pipeline: STAGES stages of four units, one for each warpgroup: 64 rows x 128 codes (4096 bytes),
//     256 bytes of shifts and 64 of row references, of MXFP4; other sizes of other weights
//     (few_tokens_weights.cuh). A unit of stage 1 has DEPTH_1 / 4 stages; in stage 2 a stage has
//     four row units of an item.
//
// Code is cold at each launch, and most of it runs once: short code is fast code here.
//
// Timeline:
//     producer: griddepcontrol.wait -> experts -> copies of stage 1 -> copies of stage 2.
//     consumers: griddepcontrol.wait -> x -> per unit: products, sums -> per row units and item:
//         products -> sums of teams -> outputs.
//     activation: per unit: sums -> features, published. encoders: per item: features, encoded.
//
// Constants: CTAS, HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K, UNITS_1 and UNITS_2 (of rows of an
// expert), DEPTH_1 and DEPTH_2 (units of depth), TOKENS (columns for tokens: 1, 2, 4, with one
// column a token also 8), STAGES, QUADS
// (sets of four values of x a consumer thread and token), ROWS (how rows are encoded), X_CODED,
// EMAX and THRESHOLD (the scale rule of bfloat16 that becomes MX), ACTIVATION, WEIGHT_FIRST,
// IDS_64, MAPPED, WEIGHTS (of routing), BIAS_1, BIAS_2 and OUT (types), MAX_ITEMS (of a team),
// TABLE_BYTES; those of few_tokens_topk.cuh and few_tokens_weights.cuh.

constexpr int TEAM = 4, WARPGROUPS = 4, CONSUMER_WARPS = 4 * WARPGROUPS;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS, THREADS = CONSUMERS + 128;
constexpr int PRODUCER = CONSUMER_WARPS, ACTIVATOR = PRODUCER + 1, ENCODER = ACTIVATOR + 1;
constexpr int TABLES = 1, ENCODE = 2, END = 3, CHOSEN = 4;  // named barriers
constexpr int ROUTERS = THREADS - CONSUMERS, TABLE_THREADS = THREADS - 32;
constexpr int SCALES_AT = WARPGROUPS * CODE_BYTES, ROWS_AT = SCALES_AT + WARPGROUPS * SCALE_BYTES;
constexpr int STAGE_BYTES = ROWS_AT + WARPGROUPS * ROW_BYTES;
constexpr int FEATURES = UNIT_ROWS / 2;             // of a unit of stage 1
constexpr int COLUMNS = 8 / TOKEN_COLUMNS;          // tokens in eight columns
constexpr int OWN = HALVES ? 1 : COLUMNS / 4;       // tokens of a thread
constexpr int PAIRS = (TOKENS + 1) / 2;             // of tokens, whose features share words
constexpr int HELD_TOKENS = TOKENS < 4 ? TOKENS : 4;  // whose x is in registers at once
constexpr int ENCODED_TOKENS = TOKENS < 4 ? TOKENS : TOKENS / 2;  // of an encoder; even, or all
constexpr int ENCODERS = TOKENS < 4 ? 1 : 2;  // of an item; with one, two take turns
constexpr int SLOTS = 32;
constexpr int PADDED_DEPTH = (DEPTH_1 + WARPGROUPS - 1) / WARPGROUPS * WARPGROUPS;  // whole stages
constexpr int TEAMS = CTAS / TEAM;

struct Shared {
    u64 ready[STAGES], free[STAGES], sums_full[2], sums_free[2], encoded[MAX_ITEMS];
    float2 sums[2][WARPGROUPS][FEATURES][COLUMNS];  // gate and up
    float h_scale[MAX_ITEMS][TOKENS], x_scale[TOKENS];
    u32 x_statistic[HELD_TOKENS][CONSUMER_WARPS];
    volatile int made;  // units of stage 1 whose features are published
    int hit;            // experts
    int experts[SLOTS], copied[SLOTS];  // by rank among those that are hit; for the producer
    u32 members[SLOTS];                 // tokens of each, a bit each
    float weights[SLOTS][TOKENS];
    Chosen chosen[TOKENS];  // where logits are given
    u64 teams[TOKENS];      // that have sums of a token, a bit each
};

static_assert(sizeof(Shared) <= TABLE_BYTES, "the host counts other bytes");

// Arguments of the launch. x_stride, x_scale_stride, logits_stride: elements between tokens.
struct Given {
    void *out;
    const u8 *codes1, *scales1, *codes2, *scales2, *rows1, *rows2;
    const void *bias1, *bias2, *x;
    const u8 *x_scale;
    const void *topk_ids, *topk_weights, *logits;
    const float *correction_bias;
    const int *expert_map;
    u64 *published;  // features [SLOTS][PAIRS][DEPTH_2 * UNIT]
    u64 *sums;       // [TEAMS][TOKENS][HIDDEN_SIZE]
    float p0, p1, p2, scaling_factor;
    int num_tokens, num_global, x_stride, x_scale_stride, logits_stride;
};

// First of `count` things that one of OF takes.
template <int OF>
DEVICE int share(int which, int count) {
    return (int)((u32)which * (u32)count / OF);
}

// What this CTA does. Units and items count over experts by rank; inside, over UNITS_1 and DEPTH_2.
struct Part {
    int first_unit, units, team, first_item, items, first_row, last_row;

    DEVICE explicit Part(int hit) {
        int cta = blockIdx.x;
        first_unit = share<CTAS>(cta, hit * UNITS_1);
        units = share<CTAS>(cta + 1, hit * UNITS_1) - first_unit;
        team = cta / TEAM;
        first_item = share<TEAMS>(team, hit * DEPTH_2);
        items = team < TEAMS ? share<TEAMS>(team + 1, hit * DEPTH_2) - first_item : 0;
        first_row = share<TEAM>(cta % TEAM, UNITS_2);
        last_row = share<TEAM>(cta % TEAM + 1, UNITS_2);
    }
};

struct Ring {
    u32 memory;
    int stage, phase;

    DEVICE u32 at() const { return memory + stage * STAGE_BYTES; }
    DEVICE void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// ---- Routing.

// Where logits are given: the experts of one token each, chosen by four warps, the producer last.
DEVICE void choose_experts(const Given &given, Shared &s, int warp, int lane) {
#pragma unroll 1
    for (int token = (warp - ENCODER) & 3; token < given.num_tokens; token += 4) {
        Router router = {given.logits, (size_t)token * given.logits_stride, given.num_global};
        router.choose(given.correction_bias, s.chosen[token], lane);
    }
}

// The routing, by a warp with a slot a lane: `key` is its local expert, or -1.
struct Slots {
    int token, key, rank, hit;
    float weight;
    u32 same;     // slots of this token with this expert
    u32 members;  // tokens with this expert, a bit each; of the first slot with it, else 0
};

DEVICE Slots find_experts(const Given &given, const Shared &s, int lane) {
    Slots own = {lane / TOP_K, -1};
    own.weight = 0.0f, own.members = 0;
    if (lane < given.num_tokens * TOP_K) {
        long long id = LOGITS != NONE ? (long long)s.chosen[own.token].experts[lane % TOP_K]
                       : IDS_64       ? ((const long long *)given.topk_ids)[lane]
                                      : (long long)((const int *)given.topk_ids)[lane];
        if (LOGITS == NONE) own.weight = load_as<WEIGHTS>(given.topk_weights, lane);
        if (id >= 0 && id < given.num_global) own.key = MAPPED ? given.expert_map[id] : (int)id;
    }
    u32 peers = __match_any_sync(ALL, own.key), leader = __ffs(peers) - 1;
    u32 leaders = __ballot_sync(ALL, own.key >= 0 && leader == lane);
    constexpr u32 OF_TOKEN = TOP_K == SLOTS ? ALL : (1u << TOP_K) - 1;
    own.rank = __popc(leaders & ((1u << leader) - 1)), own.hit = __popc(leaders);
    own.same = peers & OF_TOKEN << own.token * TOP_K;
    if (leaders >> lane & 1)
#pragma unroll
        for (int t = 0; t < TOKENS; t++)
            if (t < given.num_tokens && peers & OF_TOKEN << t * TOP_K) own.members |= 1u << t;
    return own;
}

// List experts and weights, of equal ids their sum, and let the other warps go on.
DEVICE void list_experts(const Given &given, Shared &s, int lane) {
    Slots own = find_experts(given, s, lane);
    if (own.members != 0) s.experts[own.rank] = own.key, s.members[own.rank] = own.members;
    if (lane == 0) s.hit = own.hit;
    if (LOGITS != NONE)
        for (int token = 0; token < given.num_tokens; token++) {
            float weight = weight_of(s.chosen[token], given.scaling_factor, lane % TOP_K);
            if (own.token == token) own.weight = weight;
        }
    float total = 0.0f;
    for (int i = 0; i < TOP_K; i++) {
        int other = (own.token * TOP_K + i) % SLOTS;
        float weight = __shfl_sync(ALL, own.weight, other);
        if (own.same >> other & 1) total += weight;
    }
    if (own.key >= 0 && __ffs(own.same) - 1 == lane) s.weights[own.rank][own.token] = total;
    signal_threads<TABLES, TABLE_THREADS>();
}

// ---- Producer.

DEVICE void produce(const Given &given, Shared &s, Ring ring, int lane) {
    Slots slots = find_experts(given, s, lane);
    if (slots.members != 0) s.copied[slots.rank] = slots.key;
    __syncwarp();
    Part part(slots.hit);
    u64 policy = read_once();
    int rank = part.first_unit / UNITS_1, row = part.first_unit % UNITS_1;
#pragma unroll 1
    for (int i = 0; i < part.units; i++) {
        size_t row_unit = (size_t)s.copied[rank] * UNITS_1 + row;
#pragma unroll 1
        for (int k = 0; k < DEPTH_1; k += WARPGROUPS) {
            int count = min(WARPGROUPS, DEPTH_1 - k);
            size_t unit = row_unit * DEPTH_1 + k;
            u64 *ready = s.ready + ring.stage;
            u32 to = ring.at();
            wait(s.free + ring.stage, ring.phase ^ 1);
            if (lane == 0) expect(ready, count * (CODE_BYTES + SCALE_BYTES) + ROW_BYTES);
            __syncwarp();
            if (lane == 0)
                copy(to, given.codes1 + unit * CODE_BYTES, count * CODE_BYTES, ready, policy);
            if (lane == 1)
                copy(to + SCALES_AT, given.scales1 + unit * SCALE_BYTES, count * SCALE_BYTES, ready,
                     policy);
            if (ROW_BYTES > 0 && lane == 2)
                copy(to + ROWS_AT, given.rows1 + row_unit * ROW_BYTES, ROW_BYTES, ready, policy);
            ring.advance();
        }
        if (++row == UNITS_1) row = 0, rank++;
    }
#pragma unroll 1
    for (int row = part.first_row; row < part.last_row; row += WARPGROUPS) {
        int count = min(WARPGROUPS, part.last_row - row), own = lane % WARPGROUPS;
        int rank = part.first_item / DEPTH_2, d = part.first_item % DEPTH_2;
        for (int i = 0; i < part.items; i++) {
            size_t row_unit = (size_t)s.copied[rank] * UNITS_2 + row;
            size_t unit = (row_unit + own) * DEPTH_2 + d;
            u64 *ready = s.ready + ring.stage;
            u32 to = ring.at();
            wait(s.free + ring.stage, ring.phase ^ 1);
            if (lane == 0) expect(ready, count * (CODE_BYTES + SCALE_BYTES + ROW_BYTES));
            __syncwarp();
            if (lane < WARPGROUPS && own < count)
                copy(to + own * CODE_BYTES, given.codes2 + unit * CODE_BYTES, CODE_BYTES, ready,
                     policy);
            if (lane / WARPGROUPS == 1 && own < count)
                copy(to + SCALES_AT + own * SCALE_BYTES, given.scales2 + unit * SCALE_BYTES,
                     SCALE_BYTES, ready, policy);
            if (ROW_BYTES > 0 && lane == 2 * WARPGROUPS)
                copy(to + ROWS_AT, given.rows2 + row_unit * ROW_BYTES, count * ROW_BYTES, ready,
                     policy);
            ring.advance();
            if (++d == DEPTH_2) d = 0, rank++;
        }
    }
}

// ---- Activation: features of a unit, a lane each.

DEVICE void make_features(const Given &given, Shared &s, int launch, int lane) {
    Part part(s.hit);
    int rank = part.first_unit / UNITS_1, row = part.first_unit % UNITS_1;
    for (int i = 0; i < part.units; i++) {
        int feature = row * FEATURES + lane, buffer = i & 1;
        bool inside = feature < INTERMEDIATE_SIZE;
        float gate_bias = 0.0f, up_bias = 0.0f;
        if (BIAS_1 != NONE && inside) {
            size_t place = 2 * ((size_t)s.experts[rank] * INTERMEDIATE_SIZE + feature);
            gate_bias = load_as<BIAS_1>(given.bias1, place);
            up_bias = load_as<BIAS_1>(given.bias1, place + 1);
        }
        u32 h[2 * PAIRS] = {};
        wait(s.sums_full + buffer, i >> 1 & 1);
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            float gate = 0.0f, up = 0.0f, scale = s.x_scale[t];
#pragma unroll
            for (int q = 0; q < WARPGROUPS; q++) {
                float2 sums = s.sums[buffer][q][lane][t];
                gate += sums.x, up += sums.y;
            }
            if (WEIGHT_FIRST) scale *= s.weights[rank][t];
            gate = gate * scale + gate_bias, up = up * scale + up_bias;
            float value = activate(gate, up, given.p0, given.p1, given.p2);
            if (inside && s.members[rank] >> t & 1) h[t] = to_bf16(value);
        }
        __syncwarp();
        if (lane == 0) arrive(s.sums_free + buffer);
        u64 *to = given.published + (size_t)rank * PAIRS * DEPTH_2 * UNIT + feature;
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
            publish(to + p * DEPTH_2 * UNIT, h[2 * p] | h[2 * p + 1] << 16, launch);
        if (lane == 0) s.made = i + 1;
        if (++row == UNITS_1) row = 0, rank++;
    }
}

// ---- Encoders.

// Which teams have sums of a token.
DEVICE void list_teams(const Given &given, Shared &s, const Part &part, int lane) {
    int items = s.hit * DEPTH_2;
    for (int half = 0; half < 2; half++) {
        int team = half * 32 + lane, first = share<TEAMS>(team, items);
        int last = share<TEAMS>(team + 1, items);
        u32 tokens = 0;
        if (team < TEAMS && first < last)
            for (int rank = first / DEPTH_2; rank <= (last - 1) / DEPTH_2; rank++)
                tokens |= s.members[rank];
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            u32 found = __ballot_sync(ALL, tokens >> t & 1);
            if (lane == 0) ((u32 *)(s.teams + t))[half] = found;
        }
    }
    signal_threads<END, CONSUMERS + 32>();
}

// Four features a lane, of this encoder's tokens, to an operand. Tokens are handled step by step
// together, so that their latencies overlap.
template <int FIRST>
DEVICE void encode_item(const Given &given, Shared &s, const Part &part, u32 operand, int i,
                        int launch, int lane) {
    constexpr int COUNT = FIRST < TOKENS ? ENCODED_TOKENS : 0;
    constexpr int FIRST_PAIR = FIRST / 2, OWN_PAIRS = (COUNT + 1) / 2;
    if (COUNT == 0) return;
    int rank = (part.first_item + i) / DEPTH_2, width = DEPTH_2 * UNIT;
    int first = (part.first_item + i) % DEPTH_2 * UNIT + lane * 4;
    bool there = first < UNITS_1 * FEATURES;
    const u64 *from = given.published + ((size_t)rank * PAIRS + FIRST_PAIR) * width + first;
    // Other CTAs are about as far as this one: earlier loads would only take bandwidth.
    int needed = (int)((u32)(i + 1) * (u32)part.units / (u32)part.items);
    while (s.made < needed) __nanosleep(64);
    Pair words[OWN_PAIRS + 1][2] = {};
#pragma unroll
    for (int p = 0; p < OWN_PAIRS; p++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (there) words[p][j].load(from + p * width + 2 * j);
#pragma unroll
    for (int p = 0; p < OWN_PAIRS; p++)
#pragma unroll
        for (int j = 0; j < 2; j++)
            if (there) words[p][j].await(from + p * width + 2 * j, launch);
    __syncwarp();
    float v[COUNT + 1][4];
    u32 largest[COUNT + 1];
    int blocks[COUNT + 1];
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 a = (u32)words[t / 2][j].first, b = (u32)words[t / 2][j].second;
            v[t][2 * j] = from_bf16(t % 2 ? a >> 16 : a & 0xFFFF);
            v[t][2 * j + 1] = from_bf16(t % 2 ? b >> 16 : b & 0xFFFF);
        }
        largest[t] = max(max(magnitude(v[t][0]), magnitude(v[t][1])),
                         max(magnitude(v[t][2]), magnitude(v[t][3])));
        blocks[t] = 0;
    }
    if (ROWS != HI_LO) {
#pragma unroll
        for (int m = 1; m < 8; m *= 2)
#pragma unroll
            for (int t = 0; t < COUNT; t++)
                largest[t] = max(largest[t], __shfl_xor_sync(ALL, largest[t], m));
#pragma unroll
        for (int t = 0; t < COUNT; t++) {
            blocks[t] = block_scale(largest[t]);
            largest[t] = largest[t] == 0 ? 0 : blocks[t];
        }
    }
#pragma unroll
    for (int t = 0; t < COUNT; t++) largest[t] = __reduce_max_sync(ALL, largest[t]);
#pragma unroll
    for (int t = 0; t < COUNT; t++) {
        int token = FIRST + t;
        Encoding row(largest[t]);
        store_words(operand, lane * 4, token, encode(v[t], row, blocks[t]));
        float weight = WEIGHT_FIRST ? 1.0f : s.weights[rank][token];
        if (lane == 0)
            s.h_scale[i][token] = s.members[rank] >> token & 1 ? row.scale * weight : 0.0f;
    }
    fence_async();
    __syncwarp();
    if (lane == 0) arrive(s.encoded + i);
}

// ---- Consumers.

// Encode x of all tokens; loads come first.
DEVICE void encode_tokens(const Given &given, Shared &s, u8 *operand, int tid) {
    int warp = tid / 32, lane = tid % 32;
    for (int first = 0; first < TOKENS; first += HELD_TOKENS) {
        uint2 held[HELD_TOKENS][QUADS];
        int blocks[HELD_TOKENS][QUADS];
#pragma unroll
        for (int t = 0; t < HELD_TOKENS; t++)
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                size_t quad = i * CONSUMERS + tid, token = first + t;
                held[t][i] = make_uint2(0, 0), blocks[t][i] = 0;
                if (token >= given.num_tokens || quad * 4 >= HIDDEN_SIZE) continue;
                const u8 *codes = (const u8 *)given.x + token * given.x_stride;
                const u16 *values = (const u16 *)given.x + token * given.x_stride;
                if (!X_CODED) held[t][i] = __ldcg((const uint2 *)values + quad);
                else if (ROWS == E2M1) held[t][i].x = __ldcg((const u16 *)codes + quad);
                else held[t][i].x = __ldcg((const u32 *)codes + quad);
                if (X_CODED)
                    blocks[t][i] = __ldcg(given.x_scale + token * given.x_scale_stride + quad / 8);
            }
#pragma unroll
        for (int t = 0; t < HELD_TOKENS; t++) {
            u32 statistic = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                u32 a = held[t][i].x, b = held[t][i].y, own;
                if (X_CODED) {  // blocks of zeros do not count, unless they are NaN
                    bool zero = (a & (ROWS == E2M1 ? 0x7777u : 0x7F7F7F7Fu)) == 0;
                    own = zero && blocks[t][i] != 255 ? 0 : blocks[t][i];
                } else {
                    a &= 0x7FFF7FFFu, b &= 0x7FFF7FFFu;
                    own = max(max(a & 0xFFFF, a >> 16), max(b & 0xFFFF, b >> 16)) << 16;
                    if (ROWS != HI_LO) {
                        own = block_maximum(own);
                        blocks[t][i] = block_scale(own);
                        own = own == 0 ? 0 : blocks[t][i];
                    }
                }
                statistic = max(statistic, own);
            }
            statistic = __reduce_max_sync(ALL, statistic);
            if (lane == 0) s.x_statistic[t][warp] = statistic;
        }
        sync_threads<ENCODE, CONSUMERS>();
#pragma unroll
        for (int t = 0; t < HELD_TOKENS; t++) {
            Encoding row(__reduce_max_sync(ALL, s.x_statistic[t][lane % CONSUMER_WARPS]));
            if (tid == 0) s.x_scale[first + t] = row.scale;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                int quad = i * CONSUMERS + tid;
                if (quad >= PADDED_DEPTH * (UNIT / 4)) continue;
                u32 a = held[t][i].x, b = held[t][i].y;
                const float v[4] = {from_bf16(a & 0xFFFF), from_bf16(a >> 16),
                                    from_bf16(b & 0xFFFF), from_bf16(b >> 16)};
                Words words = X_CODED ? encode_codes(a, row, blocks[t][i])
                                      : encode(v, row, blocks[t][i]);
                u32 unit = shared_address(operand + quad / 32 * OPERAND_BYTES);
                store_words(unit, quad % 32 * 4, first + t, words);
            }
        }
        if (first + HELD_TOKENS < TOKENS) sync_threads<ENCODE, CONSUMERS>();
    }
    fence_async();
}

// Threads for the outputs of a token: a power of two, at least a CTA's pairs of columns.
__device__ constexpr int output_width() {
    int width = 1;
    while (width * CTAS < HIDDEN_SIZE / 2 + CTAS - 1 && width < CONSUMERS / TOKENS) width *= 2;
    return width;
}
constexpr int OUTPUT_WIDTH = output_width(), OUTPUT_GROUPS = CONSUMERS / OUTPUT_WIDTH / TOKENS;

// Two columns of a token's outputs that a thread adds up, over every OUTPUT_GROUPS-th team.
struct Output {
    int pair, token, group;
    bool exists;
    float2 value;

    DEVICE Output(const Given &given, int tid) {
        int cta = blockIdx.x, first = share<CTAS>(cta, HIDDEN_SIZE / 2);
        int last = share<CTAS>(cta + 1, HIDDEN_SIZE / 2);
        pair = first + tid % OUTPUT_WIDTH, token = tid / OUTPUT_WIDTH % TOKENS;
        group = tid / OUTPUT_WIDTH / TOKENS;
        exists = pair < last && token < given.num_tokens;
        value = make_float2(0.0f, 0.0f);
    }

    // Biases come from memory: add them long before the sums.
    DEVICE void add_biases(const Given &given, const Shared &s) {
        constexpr int AHEAD = 8;
        int hit = BIAS_2 != NONE && group == 0 && exists ? s.hit : 0;
        for (int first = 0; first < hit; first += AHEAD) {
            float2 bias[AHEAD];
            float weight[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int rank = min(first + i, hit - 1);
                bool own = first + i < hit && s.members[rank] >> token & 1;
                size_t place = (size_t)s.experts[rank] * HIDDEN_SIZE + 2 * pair;
                bias[i].x = own ? load_as<BIAS_2>(given.bias2, place) : 0.0f;
                bias[i].y = own ? load_as<BIAS_2>(given.bias2, place + 1) : 0.0f;
                weight[i] = WEIGHT_FIRST ? 1.0f : s.weights[rank][token];
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                value.x += weight[i] * bias[i].x, value.y += weight[i] * bias[i].y;
        }
    }

    // Add the sums of all teams, in their order, and store. memory: of CONSUMERS sums.
    DEVICE void store(const Given &given, const Shared &s, float2 *memory, int launch, int tid) {
        constexpr int AHEAD = 4;
        u64 wanted = exists ? s.teams[token] : 0;
        float2 total = make_float2(0.0f, 0.0f);
        for (int first = group; first < TEAMS; first += AHEAD * OUTPUT_GROUPS) {
            Pair sums[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int team = first + i * OUTPUT_GROUPS;
                if (team < TEAMS && wanted >> team & 1) sums[i].load(place(given, team));
            }
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                int team = first + i * OUTPUT_GROUPS;
                if (team >= TEAMS || !(wanted >> team & 1)) continue;
                sums[i].await(place(given, team), launch);
                total.x += __uint_as_float((u32)sums[i].first);
                total.y += __uint_as_float((u32)sums[i].second);
            }
        }
        memory[tid] = total;
        sync_threads<ENCODE, CONSUMERS>();
        if (group != 0 || !exists) return;
        for (int i = 0; i < OUTPUT_GROUPS; i++) {
            float2 sum = memory[tid + i * OUTPUT_WIDTH * TOKENS];
            value.x += sum.x, value.y += sum.y;
        }
        size_t to = (size_t)token * (HIDDEN_SIZE / 2) + pair;
        if (OUT == F32) ((float2 *)given.out)[to] = value;
        if (OUT == BF16) ((u32 *)given.out)[to] = to_bf16(value.x) | to_bf16(value.y) << 16;
        if (OUT == F16) ((u32 *)given.out)[to] = to_f16(value.x) | to_f16(value.y) << 16;
    }

    DEVICE const u64 *place(const Given &given, int team) const {
        return given.sums + ((size_t)team * TOKENS + token) * HIDDEN_SIZE + 2 * pair;
    }
};

// Sum of the j-th token of a thread, of the two columns that it has in a row.
DEVICE float of_token(const float *d, int j) {
    return ROWS == HI_LO ? d[0] + d[1] * 0.0625f : d[j];
}

// A consumer warp's products. Products of a stage run while the codes of the next are loaded.
struct Consumer {
    const Given &given;
    Shared &s;
    Ring ring;
    int group, lane, row, column;  // row: of its 64, the even one. column: pair of eight
    u32 codes_at, scales_at, rows_at;
    Table table;
    Products products;

    DEVICE Consumer(const Given &given, Shared &s, Ring ring, int warp, int lane)
        : given(given), s(s), ring(ring), group(warp / 4), lane(lane), table(lane) {
        int thread = warp % 4 * 32 + lane;
        row = warp % 4 * 16 + lane / 4 * 2, column = lane % 4;
        codes_at = group * CODE_BYTES + thread * 16;
        int own = row + (HALVES ? column % 2 * UNIT_ROWS : 0);
        scales_at = SCALES_AT + group * SCALE_BYTES;
        scales_at += CODES == FOLDED ? thread * 2 : own * SCALE_SIZE;
        rows_at = ROWS_AT + row * (ROW_BYTES / UNIT_ROWS);
    }

    // The j-th token of this thread, and whether no other thread has the same sums of it.
    DEVICE int token_of(int j) const { return HALVES ? column / 2 : OWN * column + j; }
    DEVICE bool stores() const { return !HALVES || column % 2 == 0; }

    // With columns for halves of k32 steps, the sum of both: another thread has the other one.
    DEVICE float of_halves(float sum) const {
        return HALVES ? sum + __shfl_xor_sync(ALL, sum, 1) : sum;
    }

    // Wait for a stage. `add` takes the last products, when this stage's codes are on their way.
    // there: whether this warpgroup has a unit in it.
    template <class Add>
    DEVICE RowTerms multiply(u32 operand, u32 terms_at, bool there, Add add) {
        u32 at = ring.at();
        wait(s.ready + ring.stage, ring.phase);
        Codes codes;
        if (CODES == FOLDED || there) codes.load(at + codes_at, at + scales_at);
        else codes.clear();  // what lies there may be NaN
        RowTerms terms;
        terms.load(at + terms_at);
        products.finish();
        add();
        codes.decode_to(products.a, table, given.num_tokens >> 16);
        products.scales = codes.scales;
        products.start(operand);
        __syncwarp();  // the codes have been used
        if (lane == 0) arrive(s.free + ring.stage);
        ring.advance();
        return terms;
    }

    // Stage 1: sums of gate and up rows over a quarter of the depth, for the activation warp.
    DEVICE void multiply_units(const Part &part, u32 x_operand) {
        for (int i = 0; i < part.units; i++) {
            float total[4] = {};
            auto add = [&] {
#pragma unroll
                for (int j = 0; j < 4; j++) total[j] += products.d[j];
            };
            RowTerms terms = {};
            u32 operand = descriptor(x_operand) + group * DESCRIPTOR_STEP;
#pragma unroll 1
            for (int k = 0; k < DEPTH_1; k += WARPGROUPS) {
                terms = multiply(operand, rows_at, k + group < DEPTH_1, add);
                operand += WARPGROUPS * DESCRIPTOR_STEP;
            }
            products.finish();
            add();
            products.clear();
            float gate = terms.even(), up = terms.odd();
            int buffer = i & 1;
            wait(s.sums_free + buffer, (i >> 1 & 1) ^ 1);
            float2 *to = s.sums[buffer][group][row / 2] + token_of(0);
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                float2 sums = make_float2(of_halves(of_token(total, j)) * gate,
                                          of_halves(of_token(total + 2, j)) * up);
                if (stores()) to[j] = sums;
            }
            __syncwarp();
            if (lane == 0) arrive(s.sums_full + buffer);
        }
    }

    // Stage 2: sums of rows over the team's items, published.
    DEVICE void multiply_items(const Part &part, u32 h_operand, int launch) {
        u32 tokens = 0;
        for (int i = 0; i < part.items; i++)
            tokens |= s.members[(part.first_item + i) / DEPTH_2];
        for (int first = part.first_row; first < part.last_row; first += WARPGROUPS) {
            float total[OWN][2] = {}, scales[OWN][2] = {};
            auto add = [&] {
                const float *d = products.d;
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    total[j][0] += of_token(d, j) * scales[j][0];
                    total[j][1] += of_token(d + 2, j) * scales[j][1];
                }
            };
            for (int i = 0; i < part.items; i++) {
                if (first == part.first_row) wait(s.encoded + i, 0);
                u32 operand = descriptor(h_operand) + i * DESCRIPTOR_STEP;
                RowTerms terms = multiply(operand, rows_at + group * ROW_BYTES, true, add);
#pragma unroll
                for (int j = 0; j < OWN; j++) {
                    int token = token_of(j);
                    float scale = token < TOKENS ? s.h_scale[i][token < TOKENS ? token : 0] : 0.0f;
                    scales[j][0] = scale * terms.even();
                    scales[j][1] = scale * terms.odd();
                }
            }
            products.finish();
            add();
            products.clear();
#pragma unroll
            for (int j = 0; j < OWN; j++)
                total[j][0] = of_halves(total[j][0]), total[j][1] = of_halves(total[j][1]);
            int output = (first + group) * UNIT_ROWS + row;
            if (first + group >= part.last_row || output >= HIDDEN_SIZE) continue;
#pragma unroll
            for (int j = 0; j < OWN; j++) {
                int token = token_of(j);
                u64 *to = given.sums + ((size_t)part.team * TOKENS + token) * HIDDEN_SIZE + output;
                if (stores() && token < TOKENS && tokens >> token & 1)
                    publish(to, total[j][0], total[j][1], launch);
            }
        }
    }
};

// ---- The kernel. launches: int [CTAs], launches that each CTA has counted.

extern "C" __global__ void __launch_bounds__(THREADS, 1) _moe_few_tokens_kernel(
    void *out, const u8 *codes1, const u8 *scales1, const u8 *codes2, const u8 *scales2,
    const u8 *rows1, const u8 *rows2, const void *bias1, const void *bias2, const void *x,
    const u8 *x_scale, const void *topk_ids, const void *topk_weights, const void *logits,
    const float *correction_bias, const int *expert_map, int *launches, u64 *published, u64 *sums,
    float p0, float p1, float p2, float scaling_factor, int num_tokens, int num_global,
    int x_stride, int x_scale_stride, int logits_stride, void *, void *) {
    const Given given = {
        out,       codes1,   scales1,        codes2,       scales2,        rows1,
        rows2,     bias1,   bias2,          x,            x_scale,        topk_ids,
        topk_weights, logits, correction_bias, expert_map, published,      sums,
        p0,        p1,       p2,             scaling_factor, num_tokens,   num_global,
        x_stride,  x_scale_stride, logits_stride};
    extern __shared__ __align__(1024) u8 memory[];
    u8 *x_operand = memory + STAGES * STAGE_BYTES;
    u8 *h_operand = x_operand + PADDED_DEPTH * OPERAND_BYTES;
    Shared &s = *(Shared *)(h_operand + MAX_ITEMS * OPERAND_BYTES);
    int tid = threadIdx.x, warp = __shfl_sync(ALL, tid / 32, 0), lane = tid % 32;
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (tid == CONSUMERS) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(s.ready + i, 1);
            barrier_init(s.free + i, CONSUMER_WARPS);
        }
        for (int i = 0; i < 2; i++) {
            barrier_init(s.sums_full + i, CONSUMER_WARPS);
            barrier_init(s.sums_free + i, 1);
        }
        for (int i = 0; i < MAX_ITEMS; i++) barrier_init(s.encoded + i, ENCODERS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        s.made = 0;
    }
    for (int i = tid; i < SLOTS * TOKENS; i += THREADS) (&s.weights[0][0])[i] = 0.0f;
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int *counted = launches + blockIdx.x, launch;
    asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(launch) : "l"(counted) : "memory");
    launch++;  // the same number in all CTAs
    Ring ring = {shared_address(memory), 0, 0};
    if (warp >= PRODUCER) {
        if (LOGITS != NONE) {
            choose_experts(given, s, warp, lane);
            sync_threads<CHOSEN, ROUTERS>();
        }
        if (warp == PRODUCER) {
            produce(given, s, ring, lane);
            return;
        }
        if (warp == ACTIVATOR) {
            list_experts(given, s, lane);
            make_features(given, s, launch, lane);
            return;
        }
        sync_threads<TABLES, TABLE_THREADS>();
        Part part(s.hit);
        if (warp > ENCODER) list_teams(given, s, part, lane);
        bool in_turns = ENCODERS == 1, halves = !in_turns && warp > ENCODER;
        for (int i = in_turns ? warp - ENCODER : 0; i < part.items; i += in_turns ? 2 : 1) {
            u32 operand = shared_address(h_operand + i * OPERAND_BYTES);
            if (halves) encode_item<ENCODED_TOKENS>(given, s, part, operand, i, launch, lane);
            else encode_item<0>(given, s, part, operand, i, launch, lane);
        }
        return;
    }
    encode_tokens(given, s, x_operand, tid);
    sync_threads<TABLES, TABLE_THREADS>();
    if (tid == 0) *counted = launch;  // all threads have read it
    Part part(__shfl_sync(ALL, s.hit, 0));
    Output output(given, tid);
    output.add_biases(given, s);
    Consumer consumer(given, s, ring, warp, lane);
    consumer.multiply_units(part, shared_address(x_operand));
    consumer.multiply_items(part, shared_address(h_operand), launch);
    sync_threads<END, CONSUMERS + 32>();  // the ring is free
    output.store(given, s, (float2 *)memory, launch, tid);
}
