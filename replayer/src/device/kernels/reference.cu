// The f64 reference of the loss head, element by element: what stands between its GEMMs.
//
// A thread writes what no other thread writes, and sums in an order that the shapes alone decide, so
// the bits of a run are those of any other on the same device. `prelude.cuh` comes before it.
//
// The formulas are those of kernels/reference: docs of `logit.rs`, `tile.rs` and `plane.rs` there
// say what each variance is. Matrices are row-major; every field is 8 bytes wide.

#define INFINITY_BITS 0x7ff0000000000000ull

// Columns of a row that one thread sums lie so far apart: neighbours read neighbours.
#define LANES 64

typedef union { u64 bits; double value; } Bits;

DEVICE double infinity(void) { Bits b; b.bits = INFINITY_BITS; return b.value; }
DEVICE int is_infinite(double x) { return fabs(x) > LARGEST; }
DEVICE double square(double x) { return x * x; }

// ---- values -----------------------------------------------------------------------------------

typedef struct {
    i64 threads;
    const void *from;
    double *values;
    // Squares beside them, or null.
    double *squared;
    i64 dtype;
    // Elements of a row of `from`, the first of them that is wanted, and how many.
    i64 stride, first, columns;
} Widen;

// Exactly the element's value, one thread an element.
KERNEL(widen, Widen) {
    BEGIN(Widen);
    i64 at = thread / a.columns * a.stride + a.first + thread % a.columns;
    double x = element(a.from, a.dtype, at);
    a.values[thread] = x;
    if (a.squared) a.squared[thread] = x * x;
}

typedef struct { i64 threads; const double *values; double *sums; i64 columns; } RowSums;

// One thread a row, from the left.
KERNEL(row_sums, RowSums) {
    BEGIN(RowSums);
    const double *row = a.values + thread * a.columns;
    double sum = 0.0;
    for (i64 i = 0; i < a.columns; i++) sum += row[i];
    a.sums[thread] = sum;
}

typedef struct { i64 threads; const double *from; double *to; } Magnitudes;

KERNEL(magnitudes, Magnitudes) {
    BEGIN(Magnitudes);
    a.to[thread] = fabs(a.from[thread]);
}

typedef struct { i64 threads; double *sums; const double *addends; } Add;

// What another device summed.
KERNEL(add, Add) {
    BEGIN(Add);
    a.sums[thread] += a.addends[thread];
}

// ---- logits -----------------------------------------------------------------------------------

// The options that make a logit of a product, and the variances that rounding gives.
typedef struct {
    // [V], or null.
    const double *bias;
    double scale, softcap;
    i64 capped, uncapped, given;
    double p_rel_var, logit_rel_var, dot_rel_var, logit_floor, cap_rel_var, filter;
    i64 whole;
    double exp_rel_var, confident, log_p_rel_var;
} Head;

typedef struct { double value, var, slope, slope_var; } Logit;

DEVICE double finite_part(double x) { return is_infinite(x) ? 0.0 : x; }
DEVICE double floor_of(const Head *head, double x) { return is_infinite(x) ? 0.0 : head->logit_floor; }

DEVICE double biased(const Head *head, double product, i64 column) {
    return head->bias ? product + head->bias[column] : product;
}

DEVICE double value_of(const Head *head, double product, i64 column) {
    double scaled = head->scale * biased(head, product, column);
    return head->capped ? tanh_bounded(scaled, head->softcap) : scaled;
}

DEVICE Logit logit_of(const Head *head, double product, i64 column, double norms) {
    double with_bias = biased(head, product, column);
    double scaled = head->scale * with_bias;
    int scales = head->scale != 1.0;
    double before = (head->given ? 0.0 : square(finite_part(product)))
        + (head->bias ? square(finite_part(with_bias)) : 0.0);
    before = square(head->scale) * before + (scales ? square(finite_part(scaled)) : 0.0);
    double sums = head->dot_rel_var * square(head->scale) * norms;
    Logit logit;
    if (!head->capped) {
        int untouched = head->given && !head->bias && !scales;
        double own = untouched ? square(finite_part(scaled)) : 0.0;
        logit.value = scaled;
        logit.var = head->logit_rel_var * (before + own) + floor_of(head, scaled) + sums;
        logit.slope = head->scale;
        logit.slope_var = 0.0;
        return logit;
    }
    double slope = head->uncapped ? 1.0 : tanh_slope(scaled / head->softcap);
    double value = tanh_bounded(scaled, head->softcap), capped = value / head->softcap;
    double scaled_var = head->logit_rel_var * before + sums;
    double from_tanh = 4.0 * square(square(capped)) * head->cap_rel_var;
    double from_logit = square(2.0 * capped * slope / head->softcap) * scaled_var;
    double own = 3.0 * head->logit_rel_var * square(value)
        + head->logit_floor * (1.0 + 2.0 * square(head->softcap));
    logit.value = value;
    logit.var = square(slope) * scaled_var + own;
    logit.slope = head->scale * slope;
    logit.slope_var = square(head->scale) * (from_tanh + from_logit);
    return logit;
}

// ---- forward ----------------------------------------------------------------------------------

// What a lane, or a row up to here, has summed.
typedef struct { double max, sum, logits, squares; } Running;

// What is subtracted before exp: an infinite max would make inf - inf.
DEVICE double shift(double max) { return is_finite(max) ? max : 0.0; }

typedef struct {
    i64 threads;
    // [rows, columns], `first` the class of the first column.
    const double *products;
    i64 columns, first;
    // [rows, LANES].
    Running *lanes;
    Head head;
} Absorb;

// One thread a row and lane.
KERNEL(absorb, Absorb) {
    BEGIN(Absorb);
    const double *row = a.products + thread / LANES * a.columns;
    Running lane;
    lane.max = -infinity();
    lane.sum = lane.logits = lane.squares = 0.0;
    for (i64 v = thread % LANES; v < a.columns; v += LANES) {
        double x = value_of(&a.head, row[v], a.first + v);
        lane.max = fmax(lane.max, x);
        lane.logits += x;
        lane.squares += x * x;
    }
    double down = shift(lane.max);
    for (i64 v = thread % LANES; v < a.columns; v += LANES) {
        lane.sum += exp(value_of(&a.head, row[v], a.first + v) - down);
    }
    a.lanes[thread] = lane;
}

typedef struct {
    i64 threads;
    const double *products;
    i64 columns, first;
    const Running *lanes;
    // [rows]; `label_logits` is written where the label lies in these columns.
    Running *rows;
    const unsigned *labels;
    double *label_logits;
    Head head;
} Fold;

// One thread a row: the lanes in their order, onto what earlier columns left.
KERNEL(fold, Fold) {
    BEGIN(Fold);
    Running row = a.rows[thread];
    const Running *lanes = a.lanes + thread * LANES;
    double max = row.max;
    for (int i = 0; i < LANES; i++) max = fmax(max, lanes[i].max);
    // Nothing but masked logits so far: the sum is 0 (or NaN) and stays so.
    if (row.max > -infinity()) row.sum *= exp(shift(row.max) - shift(max));
    for (int i = 0; i < LANES; i++) {
        // A lane without a number has summed exp(-inf), or nothing: NaN must come through.
        double scale = lanes[i].max > -infinity() ? exp(shift(lanes[i].max) - shift(max)) : 1.0;
        row.sum += lanes[i].sum * scale;
        row.logits += lanes[i].logits;
        row.squares += lanes[i].squares;
    }
    row.max = max;
    a.rows[thread] = row;
    i64 label = (i64)a.labels[thread] - a.first;
    if (label >= 0 && label < a.columns) {
        a.label_logits[thread] =
            value_of(&a.head, a.products[thread * a.columns + label], a.first + label);
    }
}

// ---- entries of dlogits -----------------------------------------------------------------------

// Upstream of the rows' tokens, all [rows]; `copies` may be null.
typedef struct {
    const double *lse, *c_lse, *c_label, *c_smooth, *copies, *norms;
    const unsigned *labels;
} Tokens;

typedef struct { double p, by_logit, var; } Dense;

// Variance of what p is the exponential of.
DEVICE double logit_var(const Head *head, double lse, const Logit *logit) {
    if (head->log_p_rel_var <= 0.0) return logit->var;
    double log_p = finite_part(logit->value - lse);
    return logit->var + head->log_p_rel_var * log_p * log_p;
}

DEVICE Dense dense_of(const Head *head, const Tokens *of, i64 row, const Logit *logit) {
    Dense dense;
    dense.p = probability(logit->value, of->lse[row]);
    double softmax = of->c_lse[row] * dense.p, smooth = of->c_smooth[row];
    dense.by_logit = dense_entry(dense.p, of->c_lse[row], smooth);
    double var = logit_var(head, of->lse[row], logit);
    dense.var = softmax * softmax * (head->p_rel_var + var) + smooth * smooth * head->p_rel_var;
    return dense;
}

// Variance of the whole entry in the label's column, the slope left out.
DEVICE double whole_var(
    const Head *head, const Tokens *of, i64 row, const Logit *logit, const Dense *dense
) {
    double softmax = of->c_lse[row] * dense->p, entry = dense->by_logit + of->c_label[row];
    return entry * entry * head->p_rel_var + softmax * softmax
        * (head->exp_rel_var + logit_var(head, of->lse[row], logit));
}

typedef struct {
    i64 threads;
    // [rows, columns]: products, then dense entries.
    double *dense;
    double *squared, *noisy;
    // [rows, columns] each, or null: what a filter may have dropped; entries of a confident p.
    double *dropped, *confident;
    i64 columns, first;
    // [columns]: squared norms of the rows of k.
    const double *key_norms;
    // [rows], written where the label lies in these columns.
    double *label_slopes, *label_slope_vars, *label_entries;
    Tokens tokens;
    Head head;
} Terms;

// One thread an entry.
KERNEL(terms, Terms) {
    BEGIN(Terms);
    i64 row = thread / a.columns, v = thread % a.columns;
    const Head *head = &a.head;
    Logit logit = logit_of(head, a.dense[thread], a.first + v, a.tokens.norms[row] * a.key_norms[v]);
    Dense dense = dense_of(head, &a.tokens, row, &logit);
    int is_label = (i64)a.tokens.labels[row] == a.first + v;
    double c_label = a.tokens.c_label[row], entry = logit.slope * dense.by_logit;
    double noisy = logit.slope * logit.slope * dense.var;
    if (is_label && head->whole) {
        noisy = logit.slope * logit.slope * whole_var(head, &a.tokens, row, &logit, &dense);
    }
    // The slope of a plain head does not err, and infinity times 0 is not 0.
    if (logit.slope_var != 0.0) noisy += dense.by_logit * dense.by_logit * logit.slope_var;
    double squared = entry * entry;
    if (a.tokens.copies) {
        noisy *= a.tokens.copies[row];
        squared *= a.tokens.copies[row];
    }
    a.dense[thread] = entry;
    a.squared[thread] = squared;
    a.noisy[thread] = noisy;
    if (a.dropped) {
        double gone = 0.0;
        if (dense.p < head->filter) gone = fabs(entry);
        else if (is_label && 1.0 - dense.p < head->filter) {
            gone = fabs(logit.slope * (dense.by_logit + c_label));
        }
        a.dropped[thread] = gone;
    }
    if (a.confident) {
        int counts = dense.p >= head->confident && !(head->whole && is_label);
        a.confident[thread] = counts ? entry : 0.0;
    }
    if (is_label) {
        a.label_slopes[row] = logit.slope;
        a.label_slope_vars[row] = logit.slope_var;
        a.label_entries[row] = logit.slope * ((head->whole ? dense.by_logit : 0.0) + c_label);
    }
}

// Whose plane it is: as compare.cu has them.
enum { LOGITS = 0, LOGPROBS = 1, DLOGITS = 2 };

typedef struct {
    i64 threads;
    // [rows, valid].
    const double *products;
    // Columns of the tile, of rows of `stride`, and the variances of their entries.
    double *values, *variances;
    i64 stage, stride;
    // Columns of the tile, how many of them are valid, the class of the first.
    i64 columns, valid, first;
    const double *key_norms;
    // The logit of a column that is not valid.
    double masked;
    Tokens tokens;
    Head head;
} Plane;

// One thread an entry.
KERNEL(plane, Plane) {
    BEGIN(Plane);
    i64 row = thread / a.columns, v = thread % a.columns, at = row * a.stride + v;
    if (v >= a.valid) {
        double logit = a.stage == LOGPROBS ? a.masked - a.tokens.lse[row] : a.masked;
        a.values[at] = a.stage == DLOGITS ? 0.0 : logit;
        a.variances[at] = 0.0;
        return;
    }
    const Head *head = &a.head;
    double product = a.products[row * a.valid + v];
    Logit logit = logit_of(head, product, a.first + v, a.tokens.norms[row] * a.key_norms[v]);
    if (a.stage != DLOGITS) {
        a.values[at] = a.stage == LOGPROBS ? logit.value - a.tokens.lse[row] : logit.value;
        a.variances[at] = logit.var;
        return;
    }
    Dense dense = dense_of(head, &a.tokens, row, &logit);
    int is_label = (i64)a.tokens.labels[row] == a.first + v;
    double label = is_label ? a.tokens.c_label[row] : 0.0, by_logit = dense.by_logit + label;
    double var = dense.var + label * label * head->p_rel_var;
    if (head->whole && is_label) var = whole_var(head, &a.tokens, row, &logit, &dense);
    a.values[at] = logit.slope * by_logit;
    a.variances[at] = logit.slope * logit.slope * var + by_logit * by_logit * logit.slope_var;
}
