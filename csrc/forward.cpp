// Folds a rectangle of keys into the running softmax of query rows: Dao, "FlashAttention-2", 2023, algorithm 1.
//
// A tile's queries lie in the lanes, so that the max and the sum of a row need no exchange between lanes, and keys and
// values are broadcast one unit at a time from where they lie. A task owns some tiles of one key head; it packs the
// keys block by block, and each block serves all its tiles.

#include <math.h>

#include "level.h"
#include "parallel.h"
#include "tile.h"

RA_DECLARE_LEVEL(RA_LEVEL)

namespace ringattn::RA_LEVEL {
namespace {

// Keys of a block, packed once for the rows of a task. On a Zen 3 core 126 keys and 2048 rows are within 2% of the best
// of 126 to 378 and 512 to 2048 for S = 2048 and D = 64 and 128; 512 rows cost 8%, since keys are packed more often.
constexpr int64_t BLOCK_KEYS = 128 / PANEL * PANEL;
constexpr int64_t TASK_TILES = 2048 / LANES;

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
        for (int64_t t = 0; t < least(TASK_TILES, tiles_of(args)); t++) {
            tiles_[t].q = arena.take<Unit>(q_units_ * LANES);
            tiles_[t].acc = arena.take<float>(round_up(args.v_head_dim, PANEL) * LANES);
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
            pack({batch, kv_head, block, args_.keys - block}, seen.panels(block, BLOCK_KEYS));
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
        pack_lanes<U>(place.rows(args_.q, args_.dtype, args_.head_dim), tile.q, rows_, row_);
        if (args_.start) {
            for (int64_t i = 0; i < LANES; i++) tile.m[i] = -INF, tile.l[i] = 0;
            memset(tile.acc, 0, sizeof(float) * args_.v_head_dim * LANES);
            return;
        }
        place.read(args_.m, tile.m);
        place.read(args_.l, tile.l);
        pack_lanes<Single>(place.rows(args_.acc, RA_FLOAT32, args_.v_head_dim), tile.acc, rows_, row_);
    }

    void pack(const Keys &block, Span seen) {
        pack_across<U>(block.rows(args_.k, args_.dtype, args_.head_dim), seen.begin, seen.end, keys_, row_);
        pack_along<U, false>(block.rows(args_.v, args_.dtype, args_.v_head_dim), seen.begin, seen.end, values_, row_);
    }

    // Panels [keys.begin, keys.end) of the block at key `block`.
    void fold(Tile<U> &tile, int64_t block, Span keys) {
        Vec top[VECS], shift[VECS], decay[VECS];
        for (int j = 0; j < VECS; j++) top[j] = broadcast(-INF);
        for (int64_t panel = keys.begin; panel < keys.end; panel += PANEL) score(tile, block, panel, top);
        for (int j = 0; j < VECS; j++) {
            const Vec m = load<Vec>(tile.m + j * W), new_m = max(m, top[j]);
            // 0 stands in for -inf, so that a row without keys gets exp(-inf - 0) = 0.
            shift[j] = new_m == -INF ? Vec{} : new_m;
            decay[j] = exp(m - shift[j]);
            store(tile.m + j * W, new_m);
        }
        if (tile.dropout.is_on)
            weigh<true>(tile, block, keys, shift, decay);
        else
            weigh<false>(tile, block, keys, shift, decay);
        const int64_t first = keys.begin / U::per, units = (keys.end - keys.begin) / U::per;
        const Unit *const weights = (const Unit *)scores_ + first * LANES, *const values = values_ + first * v_ld_;
        for (int64_t d = 0; d < args_.v_head_dim; d += PANEL) {
            const Accumulators sums = product<U>(values + d, 1, v_ld_, weights, LANES, units);
            for_each(sums, [&](int i, int j, Vec x) {
                float *const acc = tile.acc + (d + i) * LANES + j * W;
                store(acc, load<Vec>(acc) * decay[j] + x);
            });
        }
    }

    // The scores of a panel, -inf where a row does not see a key, and the largest of each row so far.
    void score(const Tile<U> &tile, int64_t block, int64_t panel, Vec *top) {
        float *const scores = scores_ + panel * LANES;
        const Accumulators dots = product<U>(keys_ + panel * k_ld_, k_ld_, 1, tile.q, LANES, q_units_);
        if (tile.sight.is_whole(block + panel) && !score_.is_capped()) {
            for_each(dots, [&](int i, int j, Vec dot) {
                const Vec s = dot * score_.scale;
                top[j] = max(top[j], s);
                store(scores + i * LANES + j * W, s);
            });
            return;
        }
        for_each(dots, [&](int i, int j, Vec dot) { store(scores + i * LANES + j * W, dot); });
        for (int64_t i = 0; i < PANEL; i++)
            for (int j = 0; j < VECS; j++) {
                float *const at = scores + i * LANES + j * W;
                Vec slope;
                const Vec s = score_(load<Vec>(at), slope);
                const Vec seen = tile.sight.sees(block + panel + i, j) ? s : broadcast(-INF);
                top[j] = max(top[j], seen);
                store(at, seen);
            }
    }

    // From scores to weights, in place, and to l, in which dropped weights stay.
    template <bool drops>
    void weigh(Tile<U> &tile, int64_t block, Span keys, const Vec *shift, const Vec *decay) {
        Vec sum[VECS] = {};
        for (int64_t k = keys.begin; k < keys.end; k += U::per)
#pragma GCC unroll 4
            for (int j = 0; j < VECS; j++) {
                Vec p[U::per];
                for (int u = 0; u < U::per; u++) {
                    p[u] = exp(load<Vec>(scores_ + (k + u) * LANES + j * W) - shift[j]);
                    sum[j] += p[u];
                    if (drops) p[u] *= tile.dropout.factors(block + k + u, j);
                }
                store((Unit *)scores_ + k / U::per * LANES + j * W, U::join(p));
            }
        for (int j = 0; j < VECS; j++) {
            float *const l = tile.l + j * W;
            store(l, load<Vec>(l) * decay[j] + sum[j]);
        }
    }

    void close(const Tile<U> &tile) {
        const Place &place = tile.place;
        unpack_lanes(tile.acc, args_.v_head_dim, rows_);
        for (int64_t i = 0; i < place.count; i++) {
            const int64_t row = place.row + i;
            float *const acc = rows_ + i * v_ld_;
            if (args_.finish) {
                finish(place, row, acc, tile.m[i], tile.l[i]);
                continue;
            }
            number_at(args_.m, place.batch, row, place.head) = tile.m[i];
            number_at(args_.l, place.batch, row, place.head) = tile.l[i];
            write_row(RA_FLOAT32, acc, at(args_.acc, sizeof(float), place.batch, row, place.head), args_.v_head_dim);
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
    // Where possible four tasks for each thread, so that none waits long for the last.
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
