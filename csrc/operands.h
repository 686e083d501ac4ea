// From the caller's tensors to operands of `multiply`, and back.
#pragma once

#include "gemm.h"
#include "ringattn_cpu.h"

namespace ringattn::RA_LEVEL {

RA_INLINE int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

RA_INLINE int64_t most(int64_t a, int64_t b) {
    return a > b ? a : b;
}

RA_INLINE int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// Elements from one row of an operand to the next: whole panels and tiles fit, and an odd number of cache lines keeps
// the rows from sharing cache sets.
RA_INLINE int64_t padded(int64_t width) {
    return round_up(width, 32) + 16;
}

RA_INLINE char *at(const ra_tensor &t, int64_t element_bytes, int64_t batch, int64_t row, int64_t head) {
    return (char *)t.data + element_bytes * (batch * t.stride[0] + row * t.stride[1] + head * t.stride[2]);
}

RA_INLINE float &number_at(const ra_tensor &t, int64_t batch, int64_t row, int64_t head) {
    return *(float *)at(t, sizeof(float), batch, row, head);
}

RA_INLINE int64_t element_bytes(int32_t dtype) {
    return dtype == RA_FLOAT32 ? 4 : 2;
}

template <class Element>
RA_INLINE void widen_row(const void *from, float *to, int64_t count) {
    typedef typename Element::Lanes Lanes;
    constexpr int64_t bytes = sizeof(Lanes) / W;
    const char *source = (const char *)from;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(to + i, Element::widen(load<Lanes>(source + bytes * i)));
    if (i < count) {
        Lanes rest = {};
        memcpy(&rest, source + bytes * i, bytes * (count - i));
        const Vec wide = Element::widen(rest);
        memcpy(to + i, &wide, sizeof(float) * (count - i));
    }
}

template <class Element>
RA_INLINE void narrow_row(const float *from, void *to, int64_t count) {
    typedef typename Element::Lanes Lanes;
    constexpr int64_t bytes = sizeof(Lanes) / W;
    char *target = (char *)to;
    int64_t i = 0;
    for (; i + W <= count; i += W) store(target + bytes * i, Element::narrow(load<Vec>(from + i)));
    if (i < count) {
        Vec rest = {};
        memcpy(&rest, from + i, sizeof(float) * (count - i));
        const Lanes narrow = Element::narrow(rest);
        memcpy(target + bytes * i, &narrow, bytes * (count - i));
    }
}

static inline void read_row(int32_t dtype, const void *from, float *to, int64_t count) {
    switch (dtype) {
    case RA_FLOAT32: return widen_row<Float32>(from, to, count);
    case RA_BFLOAT16: return widen_row<BFloat16>(from, to, count);
    default: return widen_row<Float16>(from, to, count);
    }
}

static inline void write_row(int32_t dtype, const float *from, void *to, int64_t count) {
    switch (dtype) {
    case RA_FLOAT32: return narrow_row<Float32>(from, to, count);
    case RA_BFLOAT16: return narrow_row<BFloat16>(from, to, count);
    default: return narrow_row<Float16>(from, to, count);
    }
}

// Rows [first, first + count) of one head, as fp32 with zeros around them.
struct Rows {
    const ra_tensor &tensor;
    int32_t dtype;
    int64_t batch, head, first, count, width;

    char *row(int64_t i) const {
        return at(tensor, element_bytes(dtype), batch, first + i, head);
    }

    // Rows lie far apart, where the processor does not foresee the next one.
    void prefetch(int64_t i) const {
        constexpr int64_t AHEAD = 16, LINE = 64;
        if (i + AHEAD >= count) return;
        for (int64_t b = 0; b < width * element_bytes(dtype); b += LINE) __builtin_prefetch(row(i + AHEAD) + b);
    }

    // Row i in `padded(width)` numbers at `to`.
    void read(int64_t i, float *to) const {
        prefetch(i);
        const int64_t present = i < count ? width : 0;
        if (present) read_row(dtype, row(i), to, width);
        for (int64_t d = present; d < padded(width); d++) to[d] = 0;
    }
};

// Every operand is made of units of 32 bits. They lie across a row where the head dim is contracted, along the rows
// where those are. Packing fills rows [begin, end), multiples of U::per; `row` holds U::per rows of fp32.

template <class U>
RA_INLINE int64_t units_of(int64_t width) {
    return (width + U::per - 1) / U::per;
}

// [row][unit of the head dim], with padded(width) / U::per units to a row.
template <class U>
static inline void pack_across(const Rows &rows, int64_t begin, int64_t end, typename U::Unit *to, float *row) {
    const int64_t ld = padded(rows.width);
    for (int64_t i = begin; i < end; i++) {
        if constexpr (U::per == 1) {
            rows.read(i, to + i * ld);
        } else {
            rows.read(i, row);
            narrow_row<BFloat16>(row, to + i * ld / U::per, ld);
        }
    }
}

// [unit of rows][head dim], with padded(width) units to a row. `only_finite`: zeros stand in for infinity and NaN.
template <class U, bool only_finite>
static inline void pack_along(const Rows &rows, int64_t begin, int64_t end, typename U::Unit *to, float *row) {
    const int64_t ld = padded(rows.width);
    for (int64_t i = begin; i < end; i += U::per) {
        for (int u = 0; u < U::per; u++) rows.read(i + u, row + u * ld);
        for (int64_t d = 0; d < ld; d += W) {
            Vec x[U::per];
            for (int u = 0; u < U::per; u++) {
                x[u] = load<Vec>(row + u * ld + d);
                if (only_finite) x[u] = x[u] - x[u] == 0 ? x[u] : Vec{};
            }
            store(to + i / U::per * ld + d, U::join(x));
        }
    }
}

// to[column][row] = from[row][column], in numbers of 32 bits: in squares where that pays, and what they leave one by one.
template <class Number>
static inline void turn(const Number *from, int64_t rows, int64_t columns, int64_t from_ld, Number *to, int64_t to_ld) {
    int64_t square_rows = 0, square_columns = 0;
#if RA_TRANSPOSE
    square_rows = rows / W * W, square_columns = columns / W * W;
    for (int64_t r = 0; r < square_rows; r += W)
        for (int64_t c = 0; c < square_columns; c += W) {
            VecU square[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) square[i] = load<VecU>(from + (r + i) * from_ld + c);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) store(to + (c + i) * to_ld + r, square[i]);
        }
#endif
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = c < square_columns ? square_rows : 0; r < rows; r++) to[c * to_ld + r] = from[r * from_ld + c];
}

// [unit of the head dim][LANES], the right operand of scores. `rows` holds LANES rows of fp32.
template <class U>
static inline void pack_lanes(const Rows &from, typename U::Unit *to, float *rows, float *row) {
    typename U::Unit *const units = (typename U::Unit *)rows;
    pack_across<U>(from, 0, LANES, units, row);
    turn(units, LANES, units_of<U>(from.width), padded(from.width) / U::per, to, LANES);
}

// From [width][LANES] to rows of padded(width).
static inline void unpack_lanes(const float *from, int64_t width, float *rows) {
    turn(from, width, LANES, LANES, rows, padded(width));
}

static inline void add_row(const float *row, float *to, int64_t count) {
    for (int64_t d = 0; d < count; d++) to[d] += row[d];
}

static inline void scale_row(float *row, float factor, int64_t count) {
    for (int64_t d = 0; d < count; d++) row[d] *= factor;
}

} // namespace ringattn::RA_LEVEL
