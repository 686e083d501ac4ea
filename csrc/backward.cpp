// Adds the gradients of a rectangle of scores: Dao, "FlashAttention-2", 2023, algorithm 2.
//
// A team of threads owns a key head. It walks over the head's tiles in chunks, and for each chunk over the keys in
// blocks. A step is one chunk x one block, in two phases: first each tile gets its weights, the gradients of its scores
// and its dq; then the keys get their dk and dv, summed over the chunk. Every sum is made by one thread and in one
// order, so that the number of threads changes no bit.

#include "level.h"
#include "parallel.h"
#include "tile.h"

RA_DECLARE_LEVEL(RA_LEVEL)

namespace ringattn::RA_LEVEL {
namespace {

// Larger chunks read and write keys and their gradients less often, larger blocks the tiles. On a Zen 3 core 96 keys
// and 1024 rows are within 2% of the best of 48 to 126 and 256 to 1024 for S = 2048 and D = 64 and 128; 256 rows cost
// 7%.
constexpr int64_t BLOCK_KEYS = 96 / PANEL * PANEL;
constexpr int64_t CHUNK_TILES = 1024 / LANES;
constexpr int64_t PART_TILES = PART / LANES; // a sum over rows has parts as one in registers has

template <class U>
struct Tile {
    typedef typename U::Unit Unit;

    Place place;
    Sight sight;
    Dropout dropout;
    Span keys;                      // the panels of the block at hand that it sees
    float lse[LANES], delta[LANES]; // delta times softmax_scale
    Unit *q, *dout;                 // [unit of the head dim][LANES]
    Unit *q_rows, *dout_rows;       // [unit of rows][head dim], q finite
    Unit *p, *ds;                   // [BLOCK_KEYS][unit of rows], weights, and gradients of dot products
    float *dq;                      // [D][LANES]
};

// What the threads of a team share: a chunk of tiles and a block of keys.
template <class U>
struct Shared {
    typedef typename U::Unit Unit;

    Barrier barrier;
    Tile<U> tiles[CHUNK_TILES];
    Unit *k, *v;   // [BLOCK_KEYS][unit of the head dim]
    Unit *k_along; // [unit of keys][D], finite

    Shared(const ra_args &args, Arena &arena) {
        const int64_t k_ld = padded(args.head_dim), v_ld = padded(args.v_head_dim);
        for (int64_t t = 0; t < least(CHUNK_TILES, tiles_of(args)); t++) {
            Tile<U> &tile = tiles[t];
            tile.q = arena.take<Unit>(k_ld / U::per * LANES);
            tile.dout = arena.take<Unit>(v_ld / U::per * LANES);
            tile.q_rows = arena.take<Unit>(LANES / U::per * k_ld);
            tile.dout_rows = arena.take<Unit>(LANES / U::per * v_ld);
            tile.p = arena.take<Unit>(BLOCK_KEYS * LANES / U::per);
            tile.ds = arena.take<Unit>(BLOCK_KEYS * LANES / U::per);
            tile.dq = arena.take<float>(round_up(args.head_dim, PANEL) * LANES);
        }
        k = arena.take<Unit>(BLOCK_KEYS * k_ld / U::per);
        v = arena.take<Unit>(BLOCK_KEYS * v_ld / U::per);
        k_along = arena.take<Unit>(BLOCK_KEYS / U::per * k_ld);
    }
};

template <class U>
class Worker {
    typedef typename U::Unit Unit;

    static constexpr int64_t ROW_UNITS = LANES / U::per;

    const ra_args &args_;
    const Score score_;
    const int64_t k_ld_, v_ld_;
    Shared<U> *team_ = nullptr;
    int rank_ = 0, size_ = 1; // in the team
    float *dots_, *dp_;       // [PANEL][LANES]
    Unit *ds_along_;          // [unit of keys][LANES]
    float *sums_;             // [BLOCK_KEYS][D or Dv]
    float *rows_, *row_;      // LANES and `per` rows, to pack

  public:
    Worker(const ra_args &args, Arena &arena)
        : args_(args), score_(args), k_ld_(padded(args.head_dim)), v_ld_(padded(args.v_head_dim)) {
        const int64_t widest = most(k_ld_, v_ld_);
        dots_ = arena.take<float>(PANEL * LANES);
        dp_ = arena.take<float>(PANEL * LANES);
        ds_along_ = arena.take<Unit>(BLOCK_KEYS / U::per * LANES);
        sums_ = arena.take<float>(BLOCK_KEYS * widest);
        rows_ = arena.take<float>(LANES * widest);
        row_ = arena.take<float>(U::per * widest);
    }

    void join(Shared<U> &team, int rank, int size) {
        team_ = &team, rank_ = rank, size_ = size;
    }

    // Adds the gradients of one key head and of the query heads that share it.
    void run(int64_t batch, int64_t kv_head) {
        const int64_t tiles = tiles_of(args_);
        for (int64_t begin = 0; begin < tiles; begin += CHUNK_TILES) {
            const int64_t count = least(CHUNK_TILES, tiles - begin);
            share(0, count, 1, [&](int64_t t) { open(team_->tiles[t], Place(args_, batch, kv_head, begin + t)); });
            wait();
            Span seen = {args_.keys, 0};
            for (int64_t t = 0; t < count; t++) seen.add(team_->tiles[t].sight.any);
            for (int64_t block = seen.begin / BLOCK_KEYS * BLOCK_KEYS; block < seen.end; block += BLOCK_KEYS)
                step(count, {batch, kv_head, block, args_.keys - block}, seen.panels(block, BLOCK_KEYS));
            share(0, count, 1, [&](int64_t t) { close(team_->tiles[t]); });
            wait();
        }
    }

  private:
    void wait() {
        team_->barrier.wait(size_);
    }

    // Calls f for those of begin, begin + stride, ... that are this thread's: always the same ones.
    template <class F>
    void share(int64_t begin, int64_t end, int64_t stride, const F &f) {
        for (int64_t i = begin + rank_ * stride; i < end; i += size_ * stride) f(i);
    }

    void open(Tile<U> &tile, const Place &place) {
        tile.place = place;
        tile.sight.look(args_, place);
        if (tile.sight.any.is_empty()) return;
        tile.dropout.look(args_, place);
        place.read(args_.lse, tile.lse);
        place.read(args_.delta, tile.delta);
        for (int64_t i = 0; i < LANES; i++) {
            // exp(score - inf) = 0 for the rows without keys.
            if (tile.lse[i] == -INF) tile.lse[i] = INF;
            tile.delta[i] *= args_.softmax_scale;
        }
        const Rows q = place.rows(args_.q, args_.dtype, args_.head_dim);
        const Rows dout = place.rows(args_.dout, args_.dtype, args_.v_head_dim);
        pack_lanes<U>(q, tile.q, rows_, row_);
        pack_lanes<U>(dout, tile.dout, rows_, row_);
        pack_along<U, true>(q, 0, LANES, tile.q_rows, row_);
        pack_along<U, false>(dout, 0, LANES, tile.dout_rows, row_);
        memset(tile.dq, 0, sizeof(float) * args_.head_dim * LANES);
    }

    void close(const Tile<U> &tile) {
        if (tile.sight.any.is_empty() || !args_.dq.data) return;
        const Place &place = tile.place;
        unpack_lanes(tile.dq, args_.head_dim, rows_);
        for (int64_t i = 0; i < place.count; i++)
            add_row(rows_ + i * k_ld_, &number_at(args_.dq, place.batch, place.row + i, place.head), args_.head_dim);
    }

    // One block, of which the chunk sees the panels in `seen`.
    void step(int64_t count, const Keys &block, Span seen) {
        share(seen.begin, seen.end, PANEL, [&](int64_t panel) { pack(block, panel); });
        wait();
        share(0, count, 1, [&](int64_t t) { to_queries(team_->tiles[t], block.first); });
        wait();
        // Neighbours use the same rows of the tiles, so that each thread takes a run of panels.
        const int64_t run = round_up((seen.end - seen.begin + size_ - 1) / size_, PANEL);
        const Span mine = {seen.begin + rank_ * run, least(seen.begin + (rank_ + 1) * run, seen.end)};
        if (mine.is_empty() || !args_.dk.data) return;
        to_keys(count, mine, &Tile<U>::p, &Tile<U>::dout_rows, block.rows(args_.dv, RA_FLOAT32, args_.v_head_dim));
        to_keys(count, mine, &Tile<U>::ds, &Tile<U>::q_rows, block.rows(args_.dk, RA_FLOAT32, args_.head_dim));
    }

    void pack(const Keys &block, int64_t panel) {
        const Rows k = block.rows(args_.k, args_.dtype, args_.head_dim);
        pack_across<U>(k, panel, panel + PANEL, team_->k, row_);
        pack_across<U>(block.rows(args_.v, args_.dtype, args_.v_head_dim), panel, panel + PANEL, team_->v, row_);
        pack_along<U, true>(k, panel, panel + PANEL, team_->k_along, row_);
    }

    // The first phase: p, ds and dq of one tile.
    void to_queries(Tile<U> &tile, int64_t block) {
        tile.keys = tile.sight.any.panels(block, BLOCK_KEYS);
        if (tile.keys.is_empty()) return;
        for (int64_t panel = tile.keys.begin; panel < tile.keys.end; panel += PANEL) {
            dot(team_->k + panel * k_ld_ / U::per, k_ld_ / U::per, tile.q, units_of<U>(args_.head_dim), dots_);
            dot(team_->v + panel * v_ld_ / U::per, v_ld_ / U::per, tile.dout, units_of<U>(args_.v_head_dim), dp_);
            differentiate(tile, block, panel);
        }
        if (!args_.dq.data) return;
        const int64_t first = tile.keys.begin / U::per, units = (tile.keys.end - tile.keys.begin) / U::per;
        const Unit *const ds = ds_along_ + first * LANES, *const k = team_->k_along + first * k_ld_;
        for (int64_t d = 0; d < args_.head_dim; d += PANEL) {
            const Accumulators sums = product<U>(k + d, 1, k_ld_, ds, LANES, units);
            add(sums, tile.dq + d * LANES, LANES);
        }
    }

    void dot(const Unit *rows, int64_t ld, const Unit *lanes, int64_t units, float *to) {
        const Accumulators dots = product<U>(rows, ld, 1, lanes, LANES, units);
        for_each(dots, [&](int i, int j, Vec x) { store(to + i * LANES + j * W, x); });
    }

    void add(const Accumulators &sums, float *to, int64_t ld) {
        for_each(sums, [&](int i, int j, Vec x) {
            float *const at = to + i * ld + j * W;
            store(at, load<Vec>(at) + x);
        });
    }

    // From the dot products of a panel to weights and to gradients, both exactly 0 where a row does not see a key.
    void differentiate(Tile<U> &tile, int64_t block, int64_t panel) {
        const bool is_whole = tile.sight.is_whole(block + panel);
        for (int64_t i = 0; i < PANEL; i += U::per)
            for (int j = 0; j < VECS; j++) {
                Vec ds[U::per];
                for (int u = 0; u < U::per; u++) {
                    const int64_t at = (i + u) * LANES + j * W, key = panel + i + u;
                    Vec slope, p = exp(score_(load<Vec>(dots_ + at), slope) - load<Vec>(tile.lse + j * W));
                    Vec dp = load<Vec>(dp_ + at) * args_.softmax_scale;
                    Vec kept = p;
                    if (tile.dropout.is_on) {
                        const Vec factors = tile.dropout.factors(block + key, j);
                        kept *= factors;
                        dp *= factors;
                    }
                    ds[u] = p * (dp - load<Vec>(tile.delta + j * W));
                    if (score_.is_capped()) ds[u] *= slope;
                    if (!is_whole) {
                        const VecI sees = tile.sight.sees(block + key, j);
                        kept = sees ? kept : Vec{};
                        ds[u] = sees ? ds[u] : Vec{};
                    }
                    U::put(tile.p + key * ROW_UNITS, j * W, kept);
                    U::put(tile.ds + key * ROW_UNITS, j * W, ds[u]);
                }
                store(ds_along_ + (panel + i) / U::per * LANES + j * W, U::join(ds));
            }
    }

    // The second phase: adds weights^T x rows, summed over the chunk, to the gradients of some keys.
    void to_keys(int64_t count, Span keys, Unit *Tile<U>::*weights, Unit *Tile<U>::*rows, const Rows &grads) {
        const int64_t ld = padded(grads.width);
        memset(sums_ + keys.begin * ld, 0, sizeof(float) * (keys.end - keys.begin) * ld);
        for (int64_t part = 0; part < count; part += PART_TILES)
            for (int64_t d = 0; d < grads.width; d += LANES)
                for (int64_t panel = keys.begin; panel < keys.end; panel += PANEL) {
                    Accumulators sums = {};
                    for (int64_t t = part; t < least(part + PART_TILES, count); t++) {
                        const Tile<U> &tile = team_->tiles[t];
                        if (panel < tile.keys.begin || panel >= tile.keys.end) continue;
                        const Unit *const a = tile.*weights + panel * ROW_UNITS, *const b = tile.*rows + d;
                        multiply<U>(sums, a, ROW_UNITS, 1, b, ld, ROW_UNITS);
                    }
                    add(sums, sums_ + panel * ld + d, ld);
                }
        for (int64_t key = keys.begin; key < least(keys.end, grads.count); key++) {
            grads.prefetch(key);
            add_row(sums_ + key * ld, (float *)grads.row(key), grads.width);
        }
    }
};

// As many teams as leave at most an eighth of the threads' time idle, since a team waits for its slowest.
int teams_for(int64_t heads, int threads) {
    for (int teams = (int)least(heads, threads);; teams--) {
        const int64_t turns = (heads + teams - 1) / teams, size = threads / teams;
        if (8 * heads * size >= 7 * turns * threads) return teams;
    }
}

template <class U>
int backward_with(const ra_args &args) {
    const int64_t heads = args.batch * args.kv_heads;
    const int threads = (int)least(args.threads, heads * CHUNK_TILES), most_teams = teams_for(heads, threads);
    Workspace<Shared<U>> shared(most_teams, args);
    Workspace<Worker<U>> workers(threads, args);
    if (!shared.is_allocated() || !workers.is_allocated()) return RA_OUT_OF_MEMORY;
    parallel(threads, [&](int rank, int count) {
        const int teams = (int)least(most_teams, count), size = count / teams, team = rank / size;
        if (team >= teams) return;
        workers[rank].join(shared[team], rank % size, size);
        for (int64_t head = team; head < heads; head += teams)
            workers[rank].run(head / args.kv_heads, head % args.kv_heads);
    });
    return RA_OK;
}

} // namespace

int backward(const ra_args &args) {
    if (args.batch == 0 || args.rows == 0 || args.keys == 0 || args.heads == 0) return RA_OK;
#if RA_BF16_DOT
    if (args.dtype == RA_BFLOAT16) return backward_with<Pair>(args);
#endif
    return backward_with<Single>(args);
}

} // namespace ringattn::RA_LEVEL
