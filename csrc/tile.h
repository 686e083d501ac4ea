// What forward and backward know of a tile: LANES query rows of one head, one row to a lane.
#pragma once

#include "operands.h"
#include "philox.h"

namespace ringattn::RA_LEVEL {

// Where a tile lies. Tiles of the query heads that share a key head follow each other, so that they share keys at hand.
struct Place {
    int64_t batch, head, row, count;

    Place() = default;

    // Tile `index` of a key head.
    Place(const ra_args &args, int64_t batch, int64_t kv_head, int64_t index) : batch(batch) {
        const int64_t group = args.heads / args.kv_heads;
        head = kv_head * group + index % group;
        row = index / group * LANES;
        count = least(LANES, args.rows - row);
    }

    Rows rows(const ra_tensor &tensor, int32_t dtype, int64_t width) const {
        return {tensor, dtype, batch, head, row, count, width};
    }

    // One number per row into the lanes.
    void read(const ra_tensor &tensor, float *to) const {
        for (int64_t i = 0; i < LANES; i++) to[i] = i < count ? number_at(tensor, batch, row + i, head) : 0;
    }
};

// Keys of one key head from `first` on, of which there are `count`.
struct Keys {
    int64_t batch, head, first, count;

    Rows rows(const ra_tensor &tensor, int32_t dtype, int64_t width) const {
        return {tensor, dtype, batch, head, first, count, width};
    }
};

// The number of tiles of a key head.
static inline int64_t tiles_of(const ra_args &args) {
    return (args.rows + LANES - 1) / LANES * (args.heads / args.kv_heads);
}

// Keys [begin, end).
struct Span {
    int64_t begin, end;

    bool is_empty() const {
        return begin >= end;
    }

    void add(Span other) {
        begin = least(begin, other.begin);
        end = most(end, other.end);
    }

    // The part in the block of `size` keys at `block`, from its start and in whole panels.
    Span panels(int64_t block, int64_t size) const {
        const Span part = {most(begin - block, 0), least(end - block, size)};
        return part.is_empty() ? Span{0, 0} : Span{part.begin / PANEL * PANEL, round_up(part.end, PANEL)};
    }
};

// What the rows of a tile see.
struct Sight {
    int32_t lo[LANES], hi[LANES];
    Span any, all; // keys that some row sees, and that every row sees

    void look(const ra_args &args, const Place &place) {
        const int32_t keys = (int32_t)args.keys;
        any = {keys, 0}, all = {0, keys};
        for (int64_t i = 0; i < LANES; i++) {
            lo[i] = keys, hi[i] = 0;
            if (i >= place.count) continue;
            const int64_t at = place.batch * args.bounds_batch_stride + place.row + i;
            if (args.is_full || args.lo[at] < args.hi[at]) {
                lo[i] = args.is_full ? 0 : args.lo[at];
                hi[i] = args.is_full ? keys : args.hi[at];
            }
            any.add({lo[i], hi[i]});
            all = {most(all.begin, lo[i]), least(all.end, hi[i])};
        }
    }

    bool is_whole(int64_t panel) const {
        return all.begin <= panel && panel + PANEL <= all.end;
    }

    // All bits set in the lanes of vector j that see the key.
    VecI sees(int64_t key, int j) const {
        const VecI k = VecI{} + (int32_t)key;
        return (load<VecI>(lo + j * W) <= k) & (k < load<VecI>(hi + j * W));
    }
};

// From dot products to scores.
struct Score {
    float scale, cap;

    explicit Score(const ra_args &args)
        : scale(args.softcap != 0 ? args.softmax_scale / args.softcap : args.softmax_scale), cap(args.softcap) {}

    bool is_capped() const {
        return cap != 0;
    }

    // `slope`, set where there is a cap: the derivative of the capped score in the uncapped one.
    Vec operator()(Vec dot, Vec &slope) const {
        if (!is_capped()) return dot * scale;
        const Vec t = tanh(dot * scale);
        slope = 1.0f - t * t;
        return cap * t;
    }
};

// What the weights of a tile are multiplied by.
struct Dropout {
    bool is_on;
    uint64_t seed;
    uint32_t head, batch, threshold;
    float scale;
    const int32_t *k_pos;
    int64_t keys;
    uint32_t q_pos[LANES];

    void look(const ra_args &args, const Place &place) {
        is_on = args.dropout_p != 0;
        if (!is_on) return;
        seed = args.seed;
        head = (uint32_t)(args.head_offset + place.head);
        batch = (uint32_t)place.batch;
        threshold = (uint32_t)(args.dropout_p * 0x1p32);
        scale = (float)(1 / (1 - args.dropout_p));
        k_pos = args.k_pos;
        keys = args.keys;
        for (int64_t i = 0; i < LANES; i++) q_pos[i] = i < place.count ? (uint32_t)args.q_pos[place.row + i] : 0;
    }

    // For a key and the rows of vector j: a weight survives iff its random word is at least floor(p * 2^32). These are
    // factors and no selection, so that NaN survives too.
    Vec factors(int64_t key, int j) const {
        if (key >= keys) return Vec{};
        const VecU word = philox_word((uint32_t)k_pos[key], load<VecU>(q_pos + j * W), head, batch, seed);
        return word >= threshold ? broadcast(scale) : Vec{};
    }
};

} // namespace ringattn::RA_LEVEL
