/* The search of search.c for LANES blocks at once, one lane per block: in float, and in double where float is not exact enough.
 *
 * One source for all variants (lanes.h). The bound of a float sum's error is known (`prepare`). Codes of a block whose errors are closer
 * to the least one than the bound are compared in double, so the choice is always that of search.c. A few batches go through the steps
 * of the search together, so that the instructions of one fill the waits of another. In AVX-512 the errors of two batches are summed in
 * one register.
 */
#ifndef AQ_NVFP4_SWEEP_LANES_H
#define AQ_NVFP4_SWEEP_LANES_H

#include "codec.h"
#include "lanes.h"

enum {
    SUMS = 4, /* together, so that the dependent instructions of one fill the waits of the others */
    UP = 8,   /* codes that a sweep always tries, from the first one that reaches the amax upwards: */
    DOWN = 3, /* and below it: of eight Gaussian blocks at least one needs the third in 74 % of cases, the fourth in 3 % */
    WINDOW = UP + DOWN,
    ALONE = UP - DOWN,       /* codes of the window, from the first one upwards, that have no double in it */
    TRIED = SCALE_CODES + 16 /* one lane may go up 15 codes while another one goes down 125 */
};

/* LANES blocks in the search. */
struct batch {
    f32v a[MAX_GROUP], weight[MAX_GROUP]; /* a[column][block], magnitudes; weight likewise, if the plan has one */
    f32v top;                             /* largest magnitudes */
    f32v top_weight, weight_sum, delta, reach;
    i32v first;         /* first code of a sweep that reaches the amax */
    bool clips;         /* in some lane the largest code does not reach it */
    bool window;        /* the first WINDOW codes are those of list_window, and not in `code` */
    f32v least, second; /* the two least errors */
    i32v best;          /* the code of the least error */
    int count;          /* number of codes tried */
    i32v code[TRIED];
    f32v error[TRIED];                  /* before it is computed: 0, or infinity if the lane must not try the code */
    f32v step[WINDOW], inverse[WINDOW]; /* of the codes listed last */
};

/* plan->step[code], for codes 1..126. */
static inline f32v steps_of(const struct pack_plan *plan, i32v code)
{
    f32v normal = (f32v)((code << 20) + all_lanes_i(120 << 23));
    f32v small = to_floats(code) * 0x1p-9f;
    f32v s = pick(code >= 8, normal, small), factor = all_lanes(plan->tensor_scale);
    return plan->encoding == ENCODING_CT ? s / factor : s * factor;
}

/* The code from which on a float's 6 * step certainly reaches the amax; at most one above the first that does. */
static inline i32v first_codes(const struct pack_plan *plan, f32v top)
{
    const f32v reach = top * 1.0000005f;
    const f32v s = reach / (6.f * steps_of(plan, all_lanes_i(0x38))); /* code 0x38 is 1.0 */
    const i32v normal = ((i32v)((u32v)s + 0xfffffu) >> 20) - 960, small = __builtin_convertvector(s * 512.f, i32v) + 1;
    i32v code = pick_i(s < 0x1p-6f, small, normal);
    code = most_of_i(least_of_i(code, all_lanes_i(126)), all_lanes_i(1));
    for (;;) {
        i32v short_of = (6.f * steps_of(plan, code) < reach) & (code < 126);
        if (!any_lane(short_of))
            return code;
        code -= short_of; /* a true lane is -1 */
    }
}

/* first_codes where the code is a normal number and steps are in range, with the reciprocal of the largest magnitude that the code 0x38
 * (1.0) reaches. 1.000001 is more than all roundings, so the code reaches the amax. Codes below 8 are wrong, but below 11. */
ALWAYS_INLINE i32v first_codes_in_range(float reciprocal, f32v top)
{
    const f32v s = top * (1.000001f * reciprocal);
    return least_of_i(((i32v)((u32v)s + 0xfffffu) >> 20) - 960, all_lanes_i(126));
}

/* e4m3_from_clamped of LANES values, with the clamp. */
static inline i32v scale_codes(f32v t)
{
    const i32v number = t == t;
    t = pick(t > 448.f, all_lanes(448.f), t);
    t = pick(number & (t > 0x1p-9f), t, all_lanes(0x1p-9f));
    const i32v u = (i32v)t, even = (u >> 20) & 1;
    const i32v normal = (u - (120 << 23) + 0x7ffff + even) >> 20, small = (i32v)(t + 0x1p14f) - 0x46800000;
    return pick_i(number, pick_i(u < 0x3c800000, small, normal), all_lanes_i(0x7f));
}

/* block_code of LANES largest magnitudes; compressed-tensors' rule rounds in the weight's dtype after each operation. */
static inline i32v scales_by_rule(const struct pack_plan *plan, f32v top)
{
    i32v code;
    if (plan->encoding == ENCODING_CT) {
        for (int b = 0; b < LANES; b++)
            code[b] = block_code(plan, top[b]);
        return code;
    }
    f32v t;
    if (plan->encoding == ENCODING_STATIC) {
        t = top / 6.f;
        t = pick(t == 0.f, all_lanes(1.f), t) * plan->largest_code / (plan->tensor_amax / 6.f);
    } else {
        t = top / (6.f * plan->tensor_scale);
        t = pick(t == 0.f, all_lanes(1.f), t);
    }
    return scale_codes(t);
}

static inline void list(const struct pack_plan *plan, struct batch *e, i32v code, i32v lanes)
{
    const int k = e->count++;
    e->code[k] = code;
    e->step[k % WINDOW] = steps_of(plan, code);
    e->inverse[k % WINDOW] = all_lanes(1.f) / e->step[k % WINDOW];
    e->error[k] = pick(lanes, all_lanes(0.f), all_lanes(__builtin_inff()));
}

/* code, code + 1 .. (or downwards), each for the lanes in which it is one of 1..126. */
static inline void list_run(const struct pack_plan *plan, struct batch *e, i32v code, int direction, int n)
{
    for (int k = 0; k < n; k++, code += direction) {
        const i32v clamped = most_of_i(least_of_i(code, all_lanes_i(126)), all_lanes_i(1));
        list(plan, e, clamped, clamped == code);
    }
}

/* What all searches of a call share. */
struct sweep_plan {
    const struct pack_plan *pack;
    bool in_range;             /* steps in the middle of the range, and list_window with them, neither overflow nor underflow */
    float reciprocal;          /* of the largest magnitude that the code 0x38, 1.0, reaches */
    float least_top, most_top; /* between them float is exact enough, as far as the largest magnitude decides it */
    /* Steps of the codes 0..7, if they had an octave to themselves, and the reciprocals, by lane: those of code c are 2^(c / 8) and
     * 2^-(c / 8) times as large, exactly. AVX2 looks them up; other processors compute them. */
    f32v step, inverse;
};

static inline struct sweep_plan sweep_plan_of(const struct pack_plan *plan)
{
    struct sweep_plan s = {.pack = plan, .in_range = plan->encoding != ENCODING_CT && plan->step[1] > 1e-18f && plan->step[1] < 1e12f};
    const float finest = plan->step[1];
    s.reciprocal = 1.f / (6.f * plan->step[0x38]);
    s.least_top = finest > 1e-18f ? __builtin_fmaxf(1e-12f, 1.0001e-12f * finest) : __builtin_inff();
    s.most_top = finest < 1e12f ? __builtin_fminf(1e12f, 0.9999e15f * finest) : 0.f;
#ifdef __AVX2__
    s.step = steps_of(plan, (i32v){8, 9, 10, 11, 12, 13, 14, 15});
    s.inverse = all_lanes(1.f) / s.step * 2.f;
    s.step = s.step * 0.5f;
#endif
    return s;
}

/* The k-th code of a window, less the first one that reaches the amax. */
ALWAYS_INLINE int window_offset(int k)
{
    return k < UP ? k : UP - 1 - k;
}

/* Steps of codes that are normal E4M3 numbers, if s->in_range: the bits of steps_of with fewer instructions. */
ALWAYS_INLINE f32v normal_steps(const struct sweep_plan *s, i32v code)
{
#ifdef __AVX2__
    return (f32v)((i32v)_mm256_permutevar8x32_ps((__m256)s->step, (__m256i)code) + ((code >> 3) << 23));
#else
    return (f32v)((code << 20) + (120 << 23)) * s->pack->tensor_scale;
#endif
}

/* The steps of a sweep's window: the bits of list_run, if s->in_range and the smallest code, and the next one below it, are normal E4M3
 * numbers. Codes above 126 are listed too (rank_window). Steps that measure_window does not need are left out. */
ALWAYS_INLINE void list_window(const struct sweep_plan *s, struct batch *e)
{
    e->count = WINDOW;
    for (int k = 0; k < WINDOW; k++) {
        const i32v code = e->first + window_offset(k);
#ifdef __AVX512F__
        e->error[k] = all_lanes(0.f);
#else
        if (k >= ALONE && k < UP)
            continue;
#endif
        e->step[k] = normal_steps(s, code);
#ifdef __AVX2__
        e->inverse[k] = (f32v)((i32v)_mm256_permutevar8x32_ps((__m256)s->inverse, (__m256i)code) - ((code >> 3) << 23));
#else
        e->inverse[k] = all_lanes(1.f) / e->step[k];
#endif
    }
}

/* Compute the error bound of floats, and the codes to start with. */
ALWAYS_INLINE void prepare(const struct sweep_plan *s, int group, bool weighted, struct batch *e)
{
    const struct pack_plan *plan = s->pack;
    e->top_weight = all_lanes(1.f);
    e->weight_sum = all_lanes((float)group);
    if (weighted) {
        e->weight_sum = e->top_weight = all_lanes(0.f);
        for (int i = 0; i < group; i++) {
            e->weight_sum += e->weight[i];
            e->top_weight = pick((e->a[i] == e->top) & (e->weight[i] > e->top_weight), e->weight[i], e->top_weight);
        }
    }
    /* The error of each |x| - q * step is less than 4 roundings of amax, which is less than `delta`. So the root of a sum of weight * d^2
     * has an error of at most delta * sqrt(weight_sum) (triangle inequality), and the sum's own roundings stay under 2^-17 of it. */
    e->delta = e->top * 0x1p-21f;
    e->reach = 2.5f * e->delta * (weighted ? root(e->weight_sum) : all_lanes(__builtin_sqrtf((float)group)));
    e->least = e->second = all_lanes(__builtin_inff());
    e->best = all_lanes_i(0);
    e->count = 0;
    e->clips = e->window = false;
    if (plan->choice == CHOICE_SWEEP) {
        e->first = first_codes_in_range(s->reciprocal, e->top);
        e->clips = any_lane(6.f * plan->step[126] < e->top);
        e->window = s->in_range && !e->clips && !any_lane(e->first < 8 + DOWN + 1);
        if (e->window) {
            list_window(s, e);
        } else {
            e->first = first_codes(plan, e->top);
            list_run(plan, e, e->first, 1, UP);
            list_run(plan, e, e->first - 1, -1, DOWN);
        }
    } else {
        const i32v six = scales_by_rule(plan, e->top), four = scales_by_rule(plan, e->top * 1.5f);
        list(plan, e, six, all_lanes_i(-1));
        list(plan, e, four, six != four); /* the same code is not tried twice */
    }
}

/* Errors of `codes` codes from the k-th on: the sum over the columns of weight * (a - nearest grid point)^2. With
 * u = a / step and t = 2^22 * u, the last bit of t - u is half a step of u's binade, and t is a multiple of it: so
 * t - (t - u) is u rounded to the grid. If t - u is in the next binade, u is nearly a power of two, which both round to.
 * Below 1 the grid continues in halves: t is at least 2^22 + 1. */
ALWAYS_INLINE void measure(struct batch *e, int group, bool weighted, int k, int codes, bool clips)
{
    const i32v finest = (i32v)all_lanes(0x1p22f + 1.f), six = (i32v)all_lanes(6.f); /* positive floats are ordered like integers */
    f32v sum[SUMS];
    for (int s = 0; s < SUMS; s++)
        sum[s] = all_lanes(0.f);
    for (int i = 0; i < group; i += SUMS / codes)
        for (int s = 0; s < SUMS; s++) {
            const int column = i + s / codes;
            const f32v u = e->a[column] * e->inverse[(k + s % codes) % WINDOW];
            const f32v t = (f32v)most_of_i((i32v)((u32v)u + (22u << 23)), finest);
            f32v grid = t - (t - u);
            if (clips)
                grid = (f32v)least_of_i((i32v)grid, six);
            const f32v d = u - grid;
            sum[s] = roughly_fused(weighted ? e->weight[column] * d : d, d, sum[s]);
        }
    for (int c = 0; c < codes; c++) {
        for (int part = c + codes; part < SUMS; part += codes)
            sum[c] += sum[part];
        const f32v step = e->step[(k + c) % WINDOW];
        e->error[k + c] = most_of(sum[c] * (step * step), e->error[k + c]);
    }
}

ALWAYS_INLINE f32v squares_and(f32v sum, const struct batch *e, bool weighted, int column, f32v d)
{
    return roughly_fused(weighted ? e->weight[column] * d : d, d, sum);
}

/* Errors of a window, like measure. The codes c and c + 8, one step twice the other, share u and t: in units of the smaller step the grid
 * of c + 8 has whole numbers below 2, and above it the points of c's grid. Only c clips. */
ALWAYS_INLINE void measure_window(struct batch *e, int group, bool weighted)
{
    const i32v finest = (i32v)all_lanes(0x1p22f + 1.f), finest_of_double = (i32v)all_lanes(0x1p23f + 2.f), six = (i32v)all_lanes(6.f);
    f32v sum[ALONE], low[DOWN], high[DOWN];
    for (int c = 0; c < ALONE; c++)
        sum[c] = all_lanes(0.f);
#pragma GCC unroll 4
    for (int i = 0; i < group; i++)
#pragma GCC unroll 4
        for (int c = 0; c < ALONE; c++) {
            const f32v u = e->a[i] * e->inverse[c];
            const f32v t = (f32v)most_of_i((i32v)((u32v)u + (22u << 23)), finest);
            sum[c] = squares_and(sum[c], e, weighted, i, u - (t - (t - u)));
        }
    for (int c = 0; c < ALONE; c++)
        e->error[c] = sum[c] * (e->step[c] * e->step[c]);
    for (int c = 0; c < DOWN; c++)
        low[c] = high[c] = all_lanes(0.f);
#pragma GCC unroll 4
    for (int i = 0; i < group; i++)
#pragma GCC unroll 4
        for (int c = 0; c < DOWN; c++) {
            const f32v u = e->a[i] * e->inverse[UP + c];
            const i32v t = (i32v)((u32v)u + (22u << 23));
            const f32v t_low = (f32v)most_of_i(t, finest), t_high = (f32v)most_of_i(t, finest_of_double);
            const f32v grid = (f32v)least_of_i((i32v)(t_low - (t_low - u)), six);
            low[c] = squares_and(low[c], e, weighted, i, u - grid);
            high[c] = squares_and(high[c], e, weighted, i, u - (t_high - (t_high - u)));
        }
    for (int c = 0; c < DOWN; c++) {
        const f32v step = e->step[UP + c], square = step * step;
        e->error[UP + c] = low[c] * square;
        e->error[UP - 1 - c] = high[c] * square;
    }
}

#ifdef __AVX512F__
static inline __m512 joined(f32v a, f32v b)
{
    return _mm512_insertf32x8(_mm512_castps256_ps512((__m256)a), (__m256)b, 1);
}

/* measure for two groups of eight. The grid point of u is looked up by the quarter that contains u, because it changes only at
 * multiples of a quarter: u - 1/8 plus a number whose last bit is a quarter has the quarter's number in its lowest bits, five of which
 * are used. So u must stay below 8, or is clamped (`clips`), and must reach a quarter in some lane (`fills_steps`). A u that
 * is put into the next quarter is equally near to both grid points, within its own rounding. */
ALWAYS_INLINE void measure_two(struct batch *e, int group, bool weighted, int k, int codes, bool clips)
{
    const __m512 eighth = _mm512_set1_ps(0.125f), quarters = _mm512_set1_ps(0x1.8p21f), most = _mm512_set1_ps(7.f);
    const __m512 low = _mm512_sub_ps(_mm512_setr_ps(0, .5f, .5f, 1, 1, 1.5f, 1.5f, 2, 2, 2, 3, 3, 3, 3, 4, 4), eighth);
    const __m512 high = _mm512_sub_ps(_mm512_setr_ps(4, 4, 4, 4, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6), eighth);
    __m512 inverse[UP], sum[UP];
    for (int c = 0; c < codes; c++) {
        inverse[c] = joined(e[0].inverse[k + c], e[1].inverse[k + c]);
        sum[c] = _mm512_setzero_ps();
    }
    for (int i = 0; i < group; i++) {
        const __m512 a = joined(e[0].a[i], e[1].a[i]);
        const __m512 weight = weighted ? joined(e[0].weight[i], e[1].weight[i]) : a;
        for (int c = 0; c < codes; c++) {
            const __m512 u = _mm512_fmsub_ps(a, inverse[c], eighth); /* less an eighth, like the table */
            const __m512i place = _mm512_castps_si512(_mm512_add_ps(clips ? _mm512_min_ps(u, most) : u, quarters));
            const __m512 d = _mm512_sub_ps(u, _mm512_permutex2var_ps(low, place, high));
            sum[c] = _mm512_fmadd_ps(weighted ? _mm512_mul_ps(weight, d) : d, d, sum[c]);
        }
    }
    for (int c = 0; c < codes; c++) {
        const __m256 half[2] = {_mm512_castps512_ps256(sum[c]), _mm512_extractf32x8_ps(sum[c], 1)};
        for (int g = 0; g < 2; g++) {
            const f32v step = e[g].step[k + c];
            e[g].error[k + c] = most_of((f32v)half[g] * (step * step), e[g].error[k + c]);
        }
    }
}
#endif

/* The errors of the codes that `prepare` lists. */
ALWAYS_INLINE void measure_listed(const struct pack_plan *plan, int group, bool weighted, struct batch *e)
{
    if (plan->choice != CHOICE_SWEEP) {
        measure(e, group, weighted, 0, 2, true);
        return;
    }
    if (e->window) {
        measure_window(e, group, weighted);
        return;
    }
    for (int k = 0; k < UP; k += SUMS) {
        if (e->clips)
            measure(e, group, weighted, k, SUMS, true);
        else
            measure(e, group, weighted, k, SUMS, false);
    }
    measure(e, group, weighted, UP, 2, true);
    measure(e, group, weighted, UP + 2, 1, true);
}

#ifdef __AVX512F__
/* Subtracting an eighth from u loses no significant bits: in every lane the largest |x| is at least a quarter step at the largest step. */
static inline bool fills_steps(const struct pack_plan *plan, const struct batch *e)
{
    const f32v largest = e->top * e->inverse[plan->choice == CHOICE_SWEEP ? UP - 1 : 1];
    return !any_lane(~(largest >= 0.25f));
}

ALWAYS_INLINE void measure_listed_two(const struct pack_plan *plan, int group, bool weighted, struct batch *e)
{
    if (plan->choice != CHOICE_SWEEP) {
        measure_two(e, group, weighted, 0, 2, true);
        return;
    }
    if (e[0].clips | e[1].clips)
        measure_two(e, group, weighted, 0, UP, true);
    else
        measure_two(e, group, weighted, 0, UP, false);
    measure_two(e, group, weighted, UP, DOWN, true);
}
#endif

static inline void rank(struct batch *e, int k)
{
    for (; k < e->count; k++) {
        const f32v error = e->error[k];
        e->best = pick_i(error < e->least, e->code[k], e->best);
        e->second = least_of(most_of(error, e->least), e->second);
        e->least = least_of(error, e->least);
    }
}

/* rank for four-over-six. */
ALWAYS_INLINE void rank_two(struct batch *e)
{
    e->best = pick_i(e->error[1] < e->error[0], e->code[1], e->code[0]);
    e->least = least_of(e->error[0], e->error[1]), e->second = most_of(e->error[0], e->error[1]);
}

/* rank for a window: only here its codes may be above 126. */
ALWAYS_INLINE void rank_window(struct batch *e)
{
    const f32v never = all_lanes(__builtin_inff());
    for (int k = UP - 1; any_lane(e->first > 126 - k); k--)
        e->error[k] = pick(e->first > 126 - k, never, e->error[k]);
    f32v least = e->error[0], second = never;
    i32v best = all_lanes_i(0);
#pragma GCC unroll 16
    for (int k = 1; k < WINDOW; k++) {
        const f32v error = e->error[k];
        best = pick_i(error < least, all_lanes_i(window_offset(k)), best);
        second = least_of(most_of(error, least), second);
        least = least_of(error, least);
    }
    e->best = e->first + best, e->least = least, e->second = second;
}

/* Whether in some lane the amax, clipped by `code`, does not alone exceed the best error. */
ALWAYS_INLINE bool any_may_win(const struct batch *e, bool weighted, f32v root_of_least, i32v code, f32v step)
{
    const f32v limit = root_of_least + e->reach; /* certainly above the root of the exact error of the best code */
    f32v clipped = e->top - 6.f * step - e->delta;
    if (!weighted)
        return any_lane((code > 0) & (clipped <= limit * 1.0001f));
    clipped = most_of(clipped, all_lanes(0.f));
    return any_lane((code > 0) & (e->top_weight * (clipped * clipped) <= limit * limit * 1.0001f));
}

/* Codes outside the window: far up only from the smallest codes (search.c), far down as long as the clipped amax alone does not
 * exceed the best error. Returns the root of the least error. */
ALWAYS_INLINE f32v try_farther_codes(const struct sweep_plan *s, int group, bool weighted, struct batch *e)
{
    const struct pack_plan *plan = s->pack;
    f32v least = root(e->least);
    i32v code = e->first - DOWN - 1;
    if (e->window && !any_may_win(e, weighted, least, code, normal_steps(s, code)))
        return least;
    while (any_lane(e->first + e->count - DOWN < 16) & (e->count < WINDOW + 8)) {
        list_run(plan, e, e->first + e->count - DOWN, 1, 4);
        measure(e, group, weighted, e->count - 4, 4, true);
        rank(e, e->count - 4);
    }
    for (;; code -= 4) {
        least = root(e->least);
        if (!any_may_win(e, weighted, least, code, steps_of(plan, most_of_i(code, all_lanes_i(1)))))
            return least;
        list_run(plan, e, code, -1, 4);
        measure(e, group, weighted, e->count - 4, 4, true);
        rank(e, e->count - 4);
    }
}

/* One block whose codes cannot be decided in float. */
static __attribute__((noinline)) int decide_exactly(const struct pack_plan *plan, const struct batch *e, int block, float bound)
{
    float x[MAX_GROUP], w[MAX_GROUP];
    const float *weight = plan->weight ? w : NULL;
    for (int i = 0; i < plan->group; i++) {
        x[i] = e->a[i][block];
        w[i] = weight ? e->weight[i][block] : 1.f;
    }
    if (bound < 0 || plan->choice != CHOICE_SWEEP)
        return best_code(plan, x, weight);
    struct best_search search = {plan, x, weight, -1., 0., 0};
    for (int k = 0; k < e->count; k++)
        if (e->error[k][block] <= bound)
            best_search_try(&search, e->window && k < WINDOW ? e->first[block] + window_offset(k) : e->code[k][block]);
    return search.code;
}

ALWAYS_INLINE void decide(const struct sweep_plan *s, int group, bool weighted, struct batch *e)
{
    const struct pack_plan *plan = s->pack;
    if (plan->choice != CHOICE_SWEEP)
        rank_two(e);
    else if (e->window)
        rank_window(e);
    else
        rank(e, 0);
    const f32v least = plan->choice == CHOICE_SWEEP ? try_farther_codes(s, group, weighted, e) : root(e->least);
    /* Floats neither overflow nor underflow in here only in a middle range. Without weights the limits of `top` imply the others. */
    i32v ranged = (e->top > s->least_top) & (e->top < s->most_top);
    if (weighted) {
        const f32v unit = e->weight_sum * (e->delta * e->delta), quotient = e->top / plan->step[1], square = quotient * quotient;
        ranged &= (unit > 1e-36f) & (unit < 1e22f) & (square * (e->weight_sum + 1.f) < 1e36f) &
                  (square * least_of(e->weight_sum, all_lanes(1.f)) > 1e-24f);
    }
    const f32v near = least * 1.00001f + e->reach, bound = pick(ranged, near * near * 1.00001f, all_lanes(-1.f));
    const i32v open = ~(ranged & (e->second > bound));
    if (!any_lane(open))
        return;
    for (int b = 0; b < LANES; b++)
        if (open[b])
            e->best[b] = decide_exactly(plan, e, b, bound[b]);
}

/* A code per block, the one of best_code; `groups` groups of LANES blocks. */
ALWAYS_INLINE void search_as(const struct sweep_plan *s, int group, bool weighted, struct batch *e, int groups)
{
    const struct pack_plan *plan = s->pack;
    for (int g = 0; g < groups; g++)
        prepare(s, group, weighted, e + g);
    int measured = 0;
#ifdef __AVX512F__
    for (; measured + 1 < groups && fills_steps(plan, e + measured) && fills_steps(plan, e + measured + 1); measured += 2)
        measure_listed_two(plan, group, weighted, e + measured);
#endif
    for (; measured < groups; measured++)
        measure_listed(plan, group, weighted, e + measured);
    for (int g = 0; g < groups; g++)
        decide(s, group, weighted, e + g);
}

static void search(const struct sweep_plan *s, struct batch *e, int groups)
{
    if (s->pack->weight)
        search_as(s, s->pack->group, true, e, groups);
    else if (s->pack->group == 16) /* the usual case, with constant loop lengths */
        search_as(s, 16, false, e, groups);
    else
        search_as(s, s->pack->group, false, e, groups);
}

#endif
