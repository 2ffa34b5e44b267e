// Captured rows of dq or dk against the sums that lie here, and of the token x vocabulary plane
// against the reference that lies here: one thread looks at one piece of a row, from the left, and
// writes what is known of it.
//
// The structs are those of compare/allowance.rs and compare/row.rs, field for field, and the
// operations theirs, one for one and in their order: a row has the bits that the CPU gives it from
// the same sums. Every field is 8 bytes wide but for the counts at the end of a row. `prelude.cuh`
// comes before it.

// ---- what is allowed --------------------------------------------------------------------------

enum { DENSE_PART = 1, LABEL_PART = 2 };

typedef struct { double square, constant, unit, half; } Rounding;

typedef struct {
    double total, squares, shared_total, shared_squares, shared_whole, shared_confident, bias;
    i64 whole;
} Dense;

typedef struct {
    double carried;
    i64 row_variance;
    double row_alike, shared_total, shared_whole, shared_alike, bias, few_alike, few_root;
    Rounding few;
    i64 copies;
} Label;

typedef struct { Rounding part, sum; double apart; } Joined;
typedef struct { i64 parts; Dense dense; Label label; Joined joined; Rounding stored; } Allowance;

typedef struct {
    double side, total, copies, hits, label_total, label_squares, label_row, label_shared, few, most,
        copied;
} OfRow;

typedef struct { double own, row, shared; } OfColumn;

typedef struct {
    double x, squares, variance, dropped, confident, y, label_squares, label_variance, label_alike,
        label_whole, side;
} Sums;

typedef struct { double own, few, most, row, shared, certain; } Allowed;

DEVICE double variance_of(const Rounding *r, double x) { return r->square * x * x + r->constant; }
DEVICE double most_of(const Rounding *r, double x) { return r->unit * fabs(x) + r->half; }

DEVICE Allowed with_few(Allowed a, double variance, double most) {
    a.own += variance;
    a.few += variance;
    a.most += most;
    return a;
}

DEVICE Allowed of_dense(const Dense *d, const Sums *s, const OfRow *row, const OfColumn *column) {
    double x = s->x, whole = d->whole == 1 ? x + s->y : x;
    double squares = s->squares / row->copies;
    Allowed a;
    a.own = d->total * x * x + d->squares * squares + column->own;
    a.row = s->variance / row->copies + row->side * s->side * s->side + column->row
        + row->total * x * x;
    a.shared = d->shared_squares * squares + d->shared_whole * whole * whole
        + d->shared_confident * s->confident * s->confident + d->shared_total * x * x
        + column->shared;
    a.certain = s->dropped + d->bias * fabs(x);
    a.few = a.most = 0.0;
    return a;
}

DEVICE Allowed of_label(const Label *l, const Sums *s, const OfRow *row) {
    double y = s->y, squares = s->label_squares, alike = s->label_alike, whole = s->label_whole;
    double in_row = l->row_variance == 1 ? s->label_variance : 0.0;
    double own = l->row_variance == 1 ? 0.0 : s->label_variance;
    double summed = row->label_total * y * y + row->label_squares * squares;
    double root = sqrt(row->hits * squares);
    double few = l->few_alike * alike + variance_of(&l->few, y) + row->few;
    double most = l->few_root * root + most_of(&l->few, y) + row->most;
    Allowed a;
    a.own = own + summed + l->carried * fmax(squares, y * y);
    a.row = l->row_alike * alike + row->label_row * y * y + in_row;
    a.shared = (l->shared_total + row->label_shared) * y * y + l->shared_whole * whole * whole
        + l->shared_alike * alike;
    a.certain = l->bias * fabs(y);
    a.few = a.most = 0.0;
    a = with_few(a, few, most);
    if (l->copies == 1 && alike > squares && squares > 0.0)
        a = with_few(a, (alike / squares - 1.0) * summed, row->copied * root);
    return a;
}

DEVICE Allowed added(Allowed a, Allowed b) {
    a.own += b.own;
    a.few += b.few;
    a.most += b.most;
    a.row += b.row;
    a.shared += b.shared;
    a.certain += b.certain;
    return a;
}

DEVICE Allowed of_joined(const Joined *j, double one, double other) {
    double sum = one + other;
    double variance = variance_of(&j->part, one) + variance_of(&j->part, other);
    double most = most_of(&j->part, one) + most_of(&j->part, other);
    double apart = j->apart * (fabs(one) + fabs(other));
    Allowed a = { 0.0, 0.0, 0.0, 0.0, 0.0, 0.0 };
    most = most + apart + most_of(&j->sum, sum);
    return with_few(a, variance + variance_of(&j->sum, sum), most);
}

DEVICE Allowed allowance(const Allowance *of, const Sums *s, const OfRow *row, const OfColumn *col) {
    switch (of->parts) {
        case DENSE_PART: return of_dense(&of->dense, s, row, col);
        case LABEL_PART: return of_label(&of->label, s, row);
        default:
            return added(added(of_dense(&of->dense, s, row, col), of_label(&of->label, s, row)),
                of_joined(&of->joined, s->x, s->y));
    }
}

DEVICE double total_of(const Allowed *a) {
    return a->own + a->row + a->shared + a->certain * a->certain;
}

DEVICE double reach(const Allowed *a, double x) {
    double many = fmax(a->own - a->few, 0.0);
    double apart = sqrt(2.0 * x * (many + a->row)) + a->most;
    return fmin(sqrt(2.0 * x * (a->own + a->row)), apart) + sqrt(3.0 * a->shared) + a->certain;
}

// ---- units in the last place ------------------------------------------------------------------

typedef union { double value; u64 bits; } Word;

typedef struct { int exponent, fraction; u64 beyond; } Format;

DEVICE Format format_of(i64 dtype) {
    Format f;
    f.exponent = dtype == F16 ? 5 : dtype == F64 ? 11 : 8;
    f.fraction = dtype == BF16 ? 7 : dtype == F16 ? 10 : dtype == F32 ? 23 : 52;
    f.beyond = ((1ull << f.exponent) - 1ull) << f.fraction;
    return f;
}

// The bits of the nearest number of the format, ties to even, rounded once.
DEVICE u64 nearest_bits(Format f, double value) {
    Word x, power;
    x.value = value;
    if (f.fraction == 52) return x.bits;
    u64 sign = x.bits >> 63 ? 1ull << (f.exponent + f.fraction) : 0ull;
    x.value = fabs(value);
    if (x.value != x.value) return sign | f.beyond | 1ull << (f.fraction - 1);
    if (!is_finite(x.value)) return sign | f.beyond;
    int least = 2 - (1 << (f.exponent - 1)), exponent = (int)(x.bits >> 52) - 1023;
    if (exponent < least) exponent = least;
    power.bits = (u64)(1023 - (exponent - f.fraction)) << 52;
    u64 bits = (u64)(exponent - least) * (1ull << f.fraction) + (u64)rint(x.value * power.value);
    return sign | (bits < f.beyond ? bits : f.beyond);
}

enum { NO_DISTANCE = -1 };

DEVICE int bucket(u64 distance) {
    int bits = 0;
    if (distance == 0) return 0;
    for (distance -= 1; distance; distance >>= 1) bits++;
    return 1 + bits;
}

// The bucket of the distance of two numbers by their bits.
DEVICE int bucket_between(Format f, u64 a, u64 b) {
    u64 sign = 1ull << (f.exponent + f.fraction), left = a & (sign - 1), right = b & (sign - 1);
    if (left >= f.beyond || right >= f.beyond)
        return a == b && left == f.beyond ? 0 : NO_DISTANCE;
    if (((a ^ b) & sign) == 0) return bucket(left > right ? left - right : right - left);
    return left == 0 || right == 0 ? bucket(left + right) : NO_DISTANCE;
}

// ---- a row ------------------------------------------------------------------------------------

typedef struct { i64 column; double captured, reference, score; } Spot;

typedef struct {
    u64 nonfinite, exceeding, mismatches, from_zero, sign_or_overflow;
    double error, reference, captured, dot, max_abs, beyond, slope[4];
    double own[3], many[3], most, row, shared, certain;
    Spot spots[3], measured[3];
    unsigned scores[6], ulps[66];
} RowTally;

DEVICE int is_some(const Spot *spot) { return spot->column >= 0; }
DEVICE void keep(Spot *spot, Spot one) { if (!is_some(spot)) *spot = one; }
DEVICE double error_of(const Spot *spot) { return fabs(spot->captured - spot->reference); }

DEVICE void spread(double *sums, double variance) {
    sums[0] += variance;
    sums[1] += variance * variance;
    sums[2] = fmax(sums[2], variance);
}

DEVICE void add_allowed(RowTally *row, const Allowed *a) {
    spread(row->own, a->own);
    spread(row->many, fmax(a->own - a->few, 0.0));
    row->most += a->most * a->most;
    row->shared += a->shared;
    row->certain += a->certain * a->certain;
    row->row += a->row;
}

// What other tools count of an element, too.
DEVICE void measure(RowTally *row, Spot spot, Format format) {
    u64 bits = nearest_bits(format, spot.captured), wanted = nearest_bits(format, spot.reference);
    int found = bucket_between(format, bits, wanted);
    double error = error_of(&spot);
    Spot *worst = &row->measured[2];
    if (found == NO_DISTANCE) row->sign_or_overflow++; else row->ulps[found]++;
    if (bits != wanted) {
        row->mismatches++;
        keep(&row->measured[0], spot);
    }
    if (!is_finite(error) || error == 0.0) return;
    if (!is_some(&row->measured[1]) || error > error_of(&row->measured[1])) row->measured[1] = spot;
    if (spot.reference == 0.0) {
        row->from_zero++;
    } else {
        double before = is_some(worst) ? error_of(worst) / fabs(worst->reference) : 0.0;
        if (error / fabs(spot.reference) > before) *worst = spot;
    }
}

DEVICE void look_at(RowTally *row, Spot spot, const Allowed *a, double bound) {
    double reference = spot.reference, size = fabs(reference);
    double error = spot.captured - reference, most = reach(a, bound), beyond = error / most;
    const double ends[5] = { 1.0, 2.0, 3.0, 4.0, 6.0 };
    int at = 0;
    while (at < 5 && !(spot.score < ends[at])) at++;
    row->scores[at]++;
    row->error += error * error;
    row->reference += reference * reference;
    row->captured += spot.captured * spot.captured;
    row->max_abs = fmax(row->max_abs, fabs(error));
    row->dot += error * reference;
    row->slope[0] += a->own * reference * reference;
    row->slope[1] += sqrt(a->row) * size;
    row->slope[2] += sqrt(a->shared) * size;
    row->slope[3] += a->certain * size;
    if (!(fabs(error) <= most)) {
        row->exceeding++;
        keep(&row->spots[1], spot);
        row->beyond = fmax(row->beyond, beyond * beyond);
    }
    if (!is_some(&row->spots[2]) || spot.score > row->spots[2].score) row->spots[2] = spot;
}

// ---- pieces of rows ---------------------------------------------------------------------------

DEVICE void begin_piece(RowTally *row) {
    const Spot none = { -1, 0.0, 0.0, 0.0 };
    for (int i = 0; i < 3; i++) row->spots[i] = row->measured[i] = none;
}

DEVICE void look(RowTally *row, Spot spot, const Allowed *allowed, Format format, double bound) {
    double error = fabs(spot.captured - spot.reference);
    spot.score = error == 0.0 ? 0.0 : error / sqrt(total_of(allowed));
    add_allowed(row, allowed);
    measure(row, spot, format);
    if (is_finite(spot.captured) && is_finite(spot.reference)) {
        look_at(row, spot, allowed, bound);
    } else {
        row->nonfinite++;
        keep(&row->spots[0], spot);
    }
}

// ---- dq and dk --------------------------------------------------------------------------------

typedef struct {
    // One a piece: so many of each row, so wide.
    i64 threads, columns, pieces, piece;
    const void *captured;
    i64 dtype;
    // Sums of the dense part, [rows, columns], or null.
    const double *x, *squares, *variance, *dropped, *confident;
    // Of the label part, or null, and in which row of them each row lies, negative for none; null:
    // as they are.
    const double *y, *label_squares, *label_variance, *label_alike, *label_whole;
    const i64 *label_rows;
    // The rows of k or of q.
    const void *side;
    i64 side_dtype;
    // Variance of storing each element, or null where `stored` says it.
    const double *storage;
    const OfRow *rows;
    const OfColumn *of_columns;
    Allowance stage;
    // The exponent of an element's bound.
    double bound;
    RowTally *to;
} Compare;

DEVICE double at_or_0(const double *values, i64 at) { return values && at >= 0 ? values[at] : 0.0; }

DEVICE Sums sums_at(const Compare *a, i64 row, i64 column) {
    i64 at = row * a->columns + column, of_label = a->label_rows ? a->label_rows[row] : row;
    i64 label = of_label < 0 ? -1 : of_label * a->columns + column;
    Sums s;
    s.x = at_or_0(a->x, at);
    s.squares = at_or_0(a->squares, at);
    s.variance = at_or_0(a->variance, at);
    s.dropped = at_or_0(a->dropped, at);
    s.confident = at_or_0(a->confident, at);
    s.y = at_or_0(a->y, label);
    s.label_squares = at_or_0(a->label_squares, label);
    s.label_variance = at_or_0(a->label_variance, label);
    s.label_alike = at_or_0(a->label_alike, label);
    s.label_whole = at_or_0(a->label_whole, label);
    s.side = element(a->side, a->side_dtype, at);
    return s;
}

KERNEL(compare, Compare) {
    BEGIN(Compare);
    i64 at_row = thread / a.pieces, first = thread % a.pieces * a.piece, end = first + a.piece;
    const OfRow of_row = a.rows[at_row];
    const Format format = format_of(a.dtype);
    RowTally *row = a.to + thread;
    begin_piece(row);
    for (i64 column = first; column < end && column < a.columns; column++) {
        i64 at = at_row * a.columns + column;
        Sums s = sums_at(&a, at_row, column);
        Allowed allowed = allowance(&a.stage, &s, &of_row, &a.of_columns[column]);
        Spot spot;
        spot.column = column;
        spot.captured = element(a.captured, a.dtype, at);
        spot.reference = a.stage.parts == DENSE_PART ? s.x : a.stage.parts == LABEL_PART ? s.y : s.x + s.y;
        if (a.storage) {
            allowed.own += a.storage[at];
        } else {
            double size = fabs(spot.reference) + allowed.most + allowed.certain
                + 8.0 * sqrt(total_of(&allowed));
            allowed = with_few(allowed, variance_of(&a.stage.stored, spot.reference),
                most_of(&a.stage.stored, size));
        }
        look(row, spot, &allowed, format, a.bound);
    }
}

// ---- the plane --------------------------------------------------------------------------------

enum { LOGITS = 0, LOGPROBS = 1, DLOGITS = 2 };

typedef struct {
    i64 stage;
    Rounding entry, subtracted, stored;
    double filter, factor, shared, transformed;
} PlaneAllowance;

typedef struct {
    double lse, upstream, label_upstream, scale, spread, alike;
    i64 label;
} OfToken;

DEVICE Allowed of_entry(
    const PlaneAllowance *of, const OfToken *token, i64 column, double x, double own
) {
    Allowed a = { own, 0.0, 0.0, 0.0, 0.0, 0.0 };
    double size = fabs(x);
    if (of->stage == DLOGITS) {
        double label = token->label == column ? fabs(of->factor * token->label_upstream) : 0.0;
        double dense = size + label;
        double moved = of->transformed * (1.0 + token->spread * token->spread);
        a.own = own + variance_of(&of->entry, x);
        a.row = token->scale * dense * dense;
        a.shared = (of->shared + moved) * x * x;
        a.certain = size < of->filter * fabs(token->upstream * of->factor) ? size : 0.0;
    } else if (of->stage == LOGPROBS) {
        size = fabs(token->lse) + size;
        a.own = own + variance_of(&of->subtracted, size);
        a.row = token->scale;
        a.shared = of->transformed * size * size;
    } else {
        a.shared = of->transformed * x * x;
    }
    return a;
}

typedef struct {
    // One a piece of the first `columns` of a row, which has `stride` in all.
    i64 threads, columns, stride, pieces, piece;
    const void *captured;
    i64 dtype;
    const double *values, *variances;
    const OfToken *tokens;
    PlaneAllowance stage;
    double bound;
    RowTally *to;
} ComparePlane;

KERNEL(compare_plane, ComparePlane) {
    BEGIN(ComparePlane);
    i64 at_row = thread / a.pieces, first = thread % a.pieces * a.piece, end = first + a.piece;
    const OfToken token = a.tokens[at_row];
    const Format format = format_of(a.dtype);
    RowTally *row = a.to + thread;
    begin_piece(row);
    for (i64 column = first; column < end && column < a.columns; column++) {
        i64 at = at_row * a.stride + column;
        Spot spot;
        spot.column = column;
        spot.captured = element(a.captured, a.dtype, at);
        spot.reference = a.values[at];
        Allowed allowed = of_entry(&a.stage, &token, column, spot.reference, a.variances[at]);
        double storage = variance_of(&a.stage.stored, spot.reference);
        allowed.own += storage;
        allowed.shared += token.alike * storage;
        look(row, spot, &allowed, format, a.bound);
    }
}

typedef struct {
    // One a piece of a row of a policy's tile.
    i64 threads, columns, pieces, piece;
    const float *tile;
    // The reference's entries of these columns, of rows of `stride`.
    const double *exact;
    i64 stride;
    // What the tile's entries are rounded to as the job stored them, negative for nothing.
    i64 stored;
    double *sums;
} PlaneEnergy;

DEVICE double value_of_bits(i64 dtype, u64 bits) {
    Word w;
    w.bits = bits;
    if (dtype == BF16) return of_f32_bits((unsigned)bits << 16);
    if (dtype == F16) return of_f16_bits((unsigned)bits);
    if (dtype == F32) return of_f32_bits((unsigned)bits);
    return w.value;
}

// Squared errors of a policy's entries, onto what earlier tiles left.
KERNEL(plane_energy, PlaneEnergy) {
    BEGIN(PlaneEnergy);
    i64 at_row = thread / a.pieces, first = thread % a.pieces * a.piece, end = first + a.piece;
    const Format format = format_of(a.stored);
    double sum = a.sums[thread];
    for (i64 column = first; column < end && column < a.columns; column++) {
        double x = (double)a.tile[at_row * a.columns + column];
        if (a.stored >= 0) x = value_of_bits(a.stored, nearest_bits(format, x));
        double error = x - a.exact[at_row * a.stride + column];
        sum += error * error;
    }
    a.sums[thread] = sum;
}
