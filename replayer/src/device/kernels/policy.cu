// The loss head as a policy has it, in f32, element by element: what stands between its GEMMs.
//
// The operations are those of kernels/policy (`exp.rs`, `logits.rs`, `softmax.rs`, `round.rs`), one
// for one and in their order, so that an element has the bits that the CPU gives it from the same
// products. Matrices are row-major; every argument is 8 bytes wide. `prelude.cuh` comes before it.

// ---- formats ----------------------------------------------------------------------------------

// The order of `Precision`.
enum { TO_F32 = 0, TO_TF32, TO_BF16, TO_F16, TO_E4M3, TO_E5M2, TO_F64 };

typedef union { u64 bits; double value; } Double;

DEVICE double double_of(u64 bits) { Double d; d.bits = bits; return d.value; }
DEVICE u64 bits_of_double(double value) { Double d; d.value = value; return d.bits; }

// 2^exponent, for normal numbers.
DEVICE double power(int exponent) { return double_of((u64)(exponent + 1023) << 52); }

// Nearest, ties to even; the carry may run into the exponent. NaN is kept apart, and becomes quiet.
DEVICE float drop_bits(float value, int dropped) {
    unsigned bits = bits_of(value), half = (1u << (dropped - 1)) - 1u;
    unsigned rounded = bits + half + ((bits >> dropped) & 1u);
    unsigned kept = value != value ? bits | 0x00400000u : rounded;
    return single_of(kept & (0xffffffffu << dropped));
}

// Adds and subtracts 1.5 2^52 spacings of the format: the addition rounds.
DEVICE float nearest(float value, int bits, int least, double largest, int overflows_to_nan) {
    double size = fabs((double)value), beyond = power(200);
    if (size > beyond) size = beyond;
    double own = double_of(bits_of_double(size) & 0x7ff0000000000000ull), smallest = power(least);
    double shift = (own > smallest ? own : smallest) * (1.5 * power(53 - bits));
    double rounded = (size + shift) - shift;
    float result = (float)rounded;
    if (rounded > largest) result = single_of(overflows_to_nan ? 0x7fc00000u : 0x7f800000u);
    return single_of((bits_of(result) & 0x7fffffffu) | (bits_of(value) & 0x80000000u));
}

DEVICE float rounded(float value, i64 to) {
    switch (to) {
        case TO_TF32: return drop_bits(value, 13);
        case TO_BF16: return drop_bits(value, 16);
        case TO_F16: return nearest(value, 11, -14, 65504.0, 0);
        case TO_E4M3: return nearest(value, 4, -6, 448.0, 1);
        case TO_E5M2: return nearest(value, 3, -14, 57344.0, 0);
        default: return value;
    }
}

// ---- panels -----------------------------------------------------------------------------------

// Binary16 by its fields, as in reference.cu.
DEVICE float of_f16(unsigned bits) {
    unsigned exponent = (bits >> 10) & 31u, fraction = bits & 1023u, sign = (bits & 0x8000u) << 16;
    if (exponent == 31) return single_of(sign | 0x7f800000u | (fraction << 13));
    if (exponent == 0) return single_of(sign | bits_of((float)fraction * 5.9604644775390625e-08f));
    return single_of(sign | ((exponent + 112u) << 23) | (fraction << 13));
}

// Of a value that the format holds.
DEVICE unsigned f16_bits(float value) {
    unsigned bits = bits_of(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size >= 0x7f800000u) return sign | 0x7c00u | ((size & 0x7fffffu) ? 0x200u : 0u);
    if (size < 0x38800000u) return sign | (unsigned)(single_of(size) * 16777216.0f);
    return sign | ((size >> 13) - (112u << 10));
}

// As an operand of a GEMM lies: f32, or 16 bits of it.
DEVICE void store(void *to, i64 at, float value, i64 as) {
    if (as == TO_BF16) ((unsigned short *)to)[at] = (unsigned short)(bits_of(value) >> 16);
    else if (as == TO_F16) ((unsigned short *)to)[at] = (unsigned short)f16_bits(value);
    else ((float *)to)[at] = value;
}

typedef struct {
    i64 threads;
    const void *from;
    void *to;
    i64 dtype;
    // Elements of a row of `from`, the first of them that is wanted, and how many.
    i64 stride, first, columns;
    // What each is rounded to, first and then; how it is stored.
    i64 input, operand, as;
} Narrow;

KERNEL(narrow, Narrow) {
    BEGIN(Narrow);
    i64 at = thread / a.columns * a.stride + a.first + thread % a.columns;
    float x;
    switch (a.dtype) {
        case BF16: x = single_of((unsigned)((const unsigned short *)a.from)[at] << 16); break;
        case F16: x = of_f16(((const unsigned short *)a.from)[at]); break;
        case F32: x = ((const float *)a.from)[at]; break;
        default: x = (float)((const double *)a.from)[at];
    }
    store(a.to, thread, rounded(rounded(x, a.input), a.operand), a.as);
}

// ---- logits -----------------------------------------------------------------------------------

typedef struct {
    i64 threads;
    // [rows, columns], raw before, logits after.
    float *logits;
    i64 columns, first;
    // [V], or null.
    const double *bias;
    double scale, softcap;
    i64 capped, leaving, between, end;
} Logits;

// Bias, scale and softcap, rounded as an eager job rounds.
KERNEL(policy_logits, Logits) {
    BEGIN(Logits);
    float x = rounded(a.logits[thread], a.leaving), scale = (float)a.scale, cap = (float)a.softcap;
    if (a.bias) x = rounded(x + (float)a.bias[a.first + thread % a.columns], a.between);
    if (scale != 1.0f) x = rounded(x * scale, a.between);
    if (a.capped) x = rounded(tanh_bounded_f(x, cap), a.between);
    a.logits[thread] = rounded(x, a.end);
}

// ---- forward ----------------------------------------------------------------------------------

// Lanes of a row: element i goes to lane i mod 32, lanes are added pairwise.
#define SINGLES 32

typedef struct { float max, sum, label_logit, logit_sum; } Online;

DEVICE float shift_of(float max) {
    return (bits_of(max) & 0x7fffffffu) < 0x7f800000u ? max : 0.0f;
}

typedef struct { i64 threads; const float *logits; i64 columns; float *maxima; } Maxima;

// One thread a row and lane; NaN is passed over.
KERNEL(policy_maxima, Maxima) {
    BEGIN(Maxima);
    const float *row = a.logits + thread / SINGLES * a.columns;
    float max = single_of(0xff800000u);
    for (i64 v = thread % SINGLES; v < a.columns; v += SINGLES) if (row[v] > max) max = row[v];
    a.maxima[thread] = max;
}

// The max of a row up to this tile.
DEVICE float raised(const Online *row, const float *maxima) {
    float max = single_of(0xff800000u);
    for (int i = 0; i < SINGLES; i++) if (maxima[i] > max) max = maxima[i];
    return max > row->max ? max : row->max;
}

typedef struct {
    i64 threads;
    const float *logits;
    i64 columns;
    // [rows, SINGLES] each.
    const float *maxima;
    float *sums, *logit_sums;
    // [rows], as earlier tiles left them.
    const Online *rows;
} LaneSums;

KERNEL(policy_lanes, LaneSums) {
    BEGIN(LaneSums);
    i64 row = thread / SINGLES;
    const float *logits = a.logits + row * a.columns;
    float down = shift_of(raised(&a.rows[row], a.maxima + row * SINGLES)), sum = 0.0f, all = 0.0f;
    for (i64 v = thread % SINGLES; v < a.columns; v += SINGLES) {
        sum += exp_of(logits[v] - down);
        all += logits[v];
    }
    a.sums[thread] = sum;
    a.logit_sums[thread] = all;
}

typedef struct {
    i64 threads;
    const float *logits;
    i64 columns, first;
    // [rows, SINGLES] each; the sums are folded in place.
    const float *maxima;
    float *sums, *logit_sums;
    Online *rows;
    const unsigned *labels;
} Fold;

DEVICE float pairwise(float *lanes) {
    for (int width = SINGLES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

// One thread a row.
KERNEL(policy_fold, Fold) {
    BEGIN(Fold);
    Online row = a.rows[thread];
    float max = raised(&row, a.maxima + thread * SINGLES), before = shift_of(row.max);
    float now = shift_of(max);
    // Nothing but masked logits so far: the sum is 0 (or NaN) and stays so.
    if (row.max > single_of(0xff800000u) && before != now) row.sum *= exp_of(before - now);
    row.max = max;
    row.sum += pairwise(a.sums + thread * SINGLES);
    row.logit_sum += pairwise(a.logit_sums + thread * SINGLES);
    i64 label = (i64)a.labels[thread] - a.first;
    if (label >= 0 && label < a.columns) row.label_logit = a.logits[thread * a.columns + label];
    a.rows[thread] = row;
}

// ---- backward ---------------------------------------------------------------------------------

typedef struct {
    i64 threads;
    // [rows, columns]: logits before, dlogits after.
    float *tile;
    // The same as an operand of 16 bits, or null.
    void *operand;
    i64 as, columns, first;
    // [rows] each; `label_g` is written where the label lies in these columns.
    const float *lse, *g_lse, *g_label, *smooth;
    const unsigned *labels;
    float *label_g;
    double scale, softcap;
    i64 capped, whole, p, dlogits;
} Dlogits;

KERNEL(policy_dlogits, Dlogits) {
    BEGIN(Dlogits);
    i64 row = thread / a.columns, v = thread % a.columns;
    int is_label = (i64)a.labels[row] == a.first + v;
    float x = a.tile[thread], slope = (float)a.scale, g;
    int sloped = a.capped || slope != 1.0f;
    if (a.capped) slope = tanh_bounded_slope_f(x, (float)a.softcap) * slope;
    if (is_label && sloped) a.label_g[row] = a.g_label[row] * slope;
    float p = rounded(probability_f(x, a.lse[row]), a.p);
    g = dense_entry_f(p, a.g_lse[row], a.smooth[row]);
    if (is_label && a.whole) g += a.g_label[row];
    if (sloped) g *= slope;
    g = rounded(g, a.dlogits);
    a.tile[thread] = g;
    if (a.operand) store(a.operand, thread, g, a.as);
}

typedef struct { i64 threads; float *own, *target; i64 part, total, adds; } Joined;

// A tile's part, rounded, onto a sum that is rounded.
KERNEL(policy_joined, Joined) {
    BEGIN(Joined);
    float part = rounded(a.own[thread], a.part);
    a.target[thread] = rounded(a.adds ? a.target[thread] + part : part, a.total);
}

typedef struct { i64 threads; const float *tile; i64 rows; float *sums; i64 adds; } Columns;

// One thread a column, token after token.
KERNEL(policy_columns, Columns) {
    BEGIN(Columns);
    float sum = a.adds ? a.sums[thread] : 0.0f;
    for (i64 row = 0; row < a.rows; row++) sum += a.tile[row * a.threads + thread];
    a.sums[thread] = sum;
}
