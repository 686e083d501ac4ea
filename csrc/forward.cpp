// Folds a rectangle of keys into the running softmax of query rows: Dao, "FlashAttention-2", 2023, algorithm 1.
//
// A tile's queries lie in the lanes, so that the max and the sum of a row need no exchange between lanes, and keys and
// values are broadcast one unit at a time from where they lie. A task owns some tiles that share a key head; it packs the
// keys block by block, and each block serves all its tiles.

#include <math.h>

#include "level.h"
#include "parallel.h"
#include "tile.h"

RA_DECLARE_LEVEL(RA_LEVEL)

namespace ringattn::RA_LEVEL {
namespace {

// Keys of a block, which has to stay in the L2 cache with its values, and rows of a task, over which its packing pays.
#ifndef BK
#define BK 192
#define TR 1024
#endif
constexpr int64_t BLOCK_KEYS = BK / PANEL * PANEL;
constexpr int64_t TASK_TILES = TR / LANES;

// A tile and its running softmax: the largest score so far, and the sum of exp(score - m).
template <class U>
struct Tile {
    Place place;
    Sight sight;
    Dropout dropout;
    float m[LANES], l[LANES];
    typename U::Unit *q; // [unit of D][LANES]
    float *acc;          // [Dv][LANES]
};

template <class U>
class Task {
    typedef typename U::Unit Unit;

    const ra_args &args_;
    const Score score_;
    const int64_t q_units_, k_ld_, v_ld_;
    Tile<U> tiles_[TASK_TILES];
    Unit *keys_, *values_; // [BLOCK_KEYS][k_ld_], [BLOCK_KEYS / per][v_ld_]
    float *scores_;        // [BLOCK_KEYS][LANES]; the weights take their place
    float *rows_, *row_;   // LANES and `per` rows, to pack

  public:
    Task(const ra_args &args, Arena &arena)
        : args_(args), score_(args), q_units_(units_of<U>(args.head_dim)),
          k_ld_(padded(args.head_dim) / U::per), v_ld_(padded(args.v_head_dim)) {
        const int64_t widest = padded(most(args.head_dim, args.v_head_dim));
        for (Tile<U> &tile : tiles_) {
            tile.q = arena.take<Unit>(q_units_ * LANES);
            tile.acc = arena.take<float>(round_up(args.v_head_dim, PANEL) * LANES);
        }
        keys_ = arena.take<Unit>(BLOCK_KEYS * k_ld_);
        values_ = arena.take<Unit>(BLOCK_KEYS / U::per * v_ld_);
        scores_ = arena.take<float>(BLOCK_KEYS * LANES);
        rows_ = arena.take<float>(LANES * widest);
        row_ = arena.take<float>(U::per * widest);
    }

    // Folds the keys into tiles [begin, end) of one key head.
    void run(int64_t batch, int64_t kv_head, int64_t begin, int64_t end) {
        Span seen = {args_.keys, 0};
        int64_t count = 0;
        for (int64_t t = begin; t < end; t++) {
            Tile<U> &tile = tiles_[count];
            tile.place = Place(args_, batch, kv_head, t);
            tile.sight.look(args_, tile.place);
            // A state that sees none of these keys stays as it is.
            if (tile.sight.any.is_empty() && !args_.start && !args_.finish) continue;
            seen.add(tile.sight.any);
            open(tile);
            count++;
        }
        for (int64_t block = seen.begin / BLOCK_KEYS * BLOCK_KEYS; block < seen.end; block += BLOCK_KEYS) {
            pack(batch, kv_head, block, seen.panels(block, BLOCK_KEYS));
            for (int64_t t = 0; t < count; t++) {
                const Span keys = tiles_[t].sight.any.panels(block, BLOCK_KEYS);
                if (!keys.is_empty()) fold(tiles_[t], block, keys);
            }
        }
        for (int64_t t = 0; t < count; t++) close(tiles_[t]);
    }

  private:
    void open(Tile<U> &tile) {
        const Place &place = tile.place;
        tile.dropout.look(args_, place);
        Unit *const rows = (Unit *)rows_;
        pack_across<U>(place.rows(args_.q, args_.dtype, args_.head_dim), 0, LANES, rows, row_);
        rows_to_lanes(rows, k_ld_, q_units_, tile.q);
        if (args_.start) {
            for (int64_t i = 0; i < LANES; i++) tile.m[i] = -INF, tile.l[i] = 0;
            memset(tile.acc, 0, sizeof(float) * args_.v_head_dim * LANES);
            return;
        }
        place.read(args_.m, tile.m);
        place.read(args_.l, tile.l);
        pack_across<Single>(place.rows(args_.acc, RA_FLOAT32, args_.v_head_dim), 0, LANES, rows_, row_);
        rows_to_lanes(rows_, v_ld_, args_.v_head_dim, tile.acc);
    }

    void pack(int64_t batch, int64_t kv_head, int64_t block, Span keys) {
        const int64_t count = args_.keys - block;
        const Rows k = {args_.k, args_.dtype, batch, kv_head, block, count, args_.head_dim};
        const Rows v = {args_.v, args_.dtype, batch, kv_head, block, count, args_.v_head_dim};
        pack_across<U>(k, keys.begin, keys.end, keys_, row_);
        pack_along<U, false>(v, keys.begin, keys.end, values_, row_);
    }

    void fold(Tile<U> &tile, int64_t block, Span keys) {
        Vec top[VECS], shift[VECS], decay[VECS], sum[VECS];
        for (int j = 0; j < VECS; j++) top[j] = broadcast(-INF);
        for (int64_t k = keys.begin; k < keys.end; k += PANEL) {
            const Accumulators dots = product<U>(keys_ + k * k_ld_, k_ld_, 1, tile.q, LANES, q_units_);
            float *const scores = scores_ + k * LANES;
            if (tile.sight.is_whole(block + k) && !score_.is_capped()) {
                for_each(dots, [&](int i, int j, Vec dot) {
                    const Vec s = score_.uncapped(dot);
                    top[j] = max(top[j], s);
                    store(scores + i * LANES + j * W, s);
                });
            } else {
                for_each(dots, [&](int i, int j, Vec dot) { store(scores + i * LANES + j * W, dot); });
                score(tile, block + k, scores, top);
            }
        }
        for (int j = 0; j < VECS; j++) {
            const Vec m = load<Vec>(tile.m + j * W), new_m = max(m, top[j]);
            // 0 stands in for -inf, so that a row without keys gets exp(-inf - 0) = 0.
            shift[j] = new_m == -INF ? Vec{} : new_m;
            decay[j] = exp(m - shift[j]);
            store(tile.m + j * W, new_m);
        }
        if (tile.dropout.is_on)
            weigh<true>(tile, block, keys, shift, sum);
        else
            weigh<false>(tile, block, keys, shift, sum);
        for (int j = 0; j < VECS; j++) {
            float *const l = tile.l + j * W;
            store(l, load<Vec>(l) * decay[j] + sum[j]);
        }
        const int64_t first = keys.begin / U::per, units = (keys.end - keys.begin) / U::per;
        const Unit *const weights = (const Unit *)scores_ + first * LANES, *const values = values_ + first * v_ld_;
        for (int64_t d = 0; d < args_.v_head_dim; d += PANEL) {
            const Accumulators sums = product<U>(values + d, 1, v_ld_, weights, LANES, units);
            float *const acc = tile.acc + d * LANES;
            for_each(sums, [&](int i, int j, Vec x) {
                float *const a = acc + i * LANES + j * W;
                store(a, load<Vec>(a) * decay[j] + x);
            });
        }
    }

    // A panel at `key`, where there is a cap or where some row does not see all of it: from dot products to scores.
    void score(const Tile<U> &tile, int64_t key, float *scores, Vec *top) {
        for (int64_t i = 0; i < PANEL; i++)
            for (int j = 0; j < VECS; j++) {
                float *const at = scores + i * LANES + j * W;
                const Vec s = tile.sight.sees(key + i, j) ? score_(load<Vec>(at)) : broadcast(-INF);
                top[j] = max(top[j], s);
                store(at, s);
            }
    }

    // From scores to weights, in place, and their sums, in which dropped weights stay.
    template <bool drops>
    void weigh(const Tile<U> &tile, int64_t block, Span keys, const Vec *shift, Vec *sum) {
        Vec total[VECS] = {};
        for (int64_t k = keys.begin; k < keys.end; k += U::per)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; j++) {
                Vec p[U::per];
                for (int u = 0; u < U::per; u++) {
                    p[u] = exp(load<Vec>(scores_ + (k + u) * LANES + j * W) - shift[j]);
                    total[j] += p[u];
                    if (drops) p[u] *= tile.dropout.factors(block + k + u, j);
                }
                store((Unit *)scores_ + k / U::per * LANES + j * W, U::join(p));
            }
        for (int j = 0; j < VECS; j++) sum[j] = total[j];
    }

    void close(const Tile<U> &tile) {
        const Place &place = tile.place;
        lanes_to_rows(tile.acc, args_.v_head_dim, rows_, v_ld_);
        for (int64_t i = 0; i < place.count; i++) {
            const int64_t row = place.row + i;
            float *const acc = rows_ + i * v_ld_;
            number_at(args_.m, place.batch, row, place.head) = tile.m[i];
            number_at(args_.l, place.batch, row, place.head) = tile.l[i];
            write_row(RA_FLOAT32, acc, at(args_.acc, 4, place.batch, row, place.head), args_.v_head_dim);
            if (args_.finish) finish(place, row, acc, tile.m[i], tile.l[i]);
        }
    }

    void finish(const Place &place, int64_t row, float *acc, double m, double l) {
        double top = m, weight = 1;
        if (args_.sinks) {
            const double sink = args_.sinks[place.head];
            top = m > sink ? m : sink;
            const double shift = top == -INF ? 0 : top;
            weight = ::exp(m - shift);
            l = l * weight + ::exp(sink - shift);
        }
        // l = 0 only where top = -inf, and -inf + log(0) is the -inf wanted there.
        number_at(args_.lse, place.batch, row, place.head) = (float)(top + ::log(l));
        scale_row(acc, (float)(l == 0 ? 1 : weight / l), args_.v_head_dim);
        char *const out = at(args_.out, element_bytes(args_.dtype), place.batch, row, place.head);
        write_row(args_.dtype, acc, out, args_.v_head_dim);
    }
};

template <class U>
int forward_with(const ra_args &args) {
    const int64_t heads = args.batch * args.kv_heads, tiles = tiles_of(args);
    // Four tasks for each thread, if there are as many tiles, so that none waits long for the last.
    const int64_t task_tiles = most(1, least(TASK_TILES, heads * tiles / (4 * (int64_t)args.threads)));
    const int64_t per_head = (tiles + task_tiles - 1) / task_tiles, tasks = heads * per_head;
    const int threads = (int)least(args.threads, tasks);
    Workspace<Task<U>> workspace(threads, args);
    if (!workspace.is_allocated()) return RA_OUT_OF_MEMORY;
    Counter counter;
    parallel(threads, [&](int rank, int) {
        Task<U> &task = workspace[rank];
        for (int64_t i; (i = counter.take()) < tasks;) {
            // The last rows first: under a causal mask they see the most.
            const int64_t begin = (per_head - 1 - i % per_head) * task_tiles, head = i / per_head;
            task.run(head / args.kv_heads, head % args.kv_heads, begin, least(begin + task_tiles, tiles));
        }
    });
    return RA_OK;
}

} // namespace

int forward(const ra_args &args) {
    if (args.batch == 0 || args.rows == 0 || args.heads == 0) return RA_OK;
#if RA_BF16_DOT
    if (args.dtype == RA_BFLOAT16) return forward_with<Pair>(args);
#endif
    return forward_with<Single>(args);
}

} // namespace ringattn::RA_LEVEL
