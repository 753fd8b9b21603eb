/* Eight blocks of 16 at once, a lane each: the search of search.c in float, exact where floats cannot tell.
 *
 * Written with the compiler's vector types, so that one text serves every SIMD variant; each includes it for itself.
 * How far a float error of a code may be from the exact one is known (`choose_eight`). The codes of a block that lie closer
 * to its best than that are told apart in double; so the choice is always that of search.c.
 */
#ifndef AQ_NVFP4_SWEEP_LANES_H
#define AQ_NVFP4_SWEEP_LANES_H

#include "codec.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef float lanes_f __attribute__((vector_size(32)));
typedef int32_t lanes_i __attribute__((vector_size(32)));

static inline lanes_f pick(lanes_i mask, lanes_f yes, lanes_f no)
{
    return (lanes_f)((mask & (lanes_i)yes) | (~mask & (lanes_i)no));
}

static inline lanes_i pick_i(lanes_i mask, lanes_i yes, lanes_i no)
{
    return (mask & yes) | (~mask & no);
}

/* The compiler does not see a minimum in a masked choice of vectors. */
static inline lanes_f least_of(lanes_f a, lanes_f b)
{
#ifdef __AVX2__
    return (lanes_f)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return pick(a < b, a, b);
#endif
}

static inline lanes_i most_of(lanes_i a, lanes_i b)
{
#ifdef __AVX2__
    return (lanes_i)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return pick_i(a > b, a, b);
#endif
}

static inline lanes_f root(lanes_f a)
{
#ifdef __AVX2__
    return (lanes_f)_mm256_sqrt_ps((__m256)a);
#else
    for (int b = 0; b < 8; b++)
        a[b] = __builtin_sqrtf(a[b]);
    return a;
#endif
}

static inline lanes_f all_lanes(float f)
{
    return (lanes_f){f, f, f, f, f, f, f, f};
}

static inline lanes_i all_lanes_i(int32_t i)
{
    return (lanes_i){i, i, i, i, i, i, i, i};
}

static inline bool any_lane(lanes_i mask)
{
#ifdef __AVX2__
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    typedef int64_t wide __attribute__((vector_size(32)));
    wide w = (wide)mask;
    return (w[0] | w[1] | w[2] | w[3]) != 0;
#endif
}

static inline lanes_f fused(lanes_f a, lanes_f b, lanes_f c)
{
#ifdef __FMA__
    return (lanes_f)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* 1.5 times the binade of |v|. */
static inline lanes_f one_and_a_half(lanes_i v)
{
#ifdef __AVX512VL__
    return (lanes_f)_mm256_ternarylogic_epi32((__m256i)all_lanes_i(0x00400000), (__m256i)v, (__m256i)all_lanes_i(0x7f800000), 0xf8);
#else
    return (lanes_f)((v & 0x7f800000) | 0x00400000);
#endif
}

/* Sum over the 16 columns of weight * (a - nearest grid point)^2. The nearest point comes from an addend whose last bit is
 * worth half a step of the value's binade: 1.5 * 2^22 times the binade, at least 1.5 * 2^22. */
static inline __attribute__((always_inline)) void float_errors(const lanes_f a[16], const lanes_f *weight, const lanes_f step[2],
                                                              bool clips, lanes_f error[2])
{
    /* Two codes together, so that one's chain of dependent instructions fills the other's waits. */
    const lanes_f six = all_lanes(0x1.8p24f);
    const lanes_i one = all_lanes_i(0x4a800000); /* 2^22 */
    const lanes_f inverse[2] = {all_lanes(1.f) / step[0], all_lanes(1.f) / step[1]};
    lanes_f sum[2] = {all_lanes(0.f), all_lanes(0.f)};
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 2; k++) {
            lanes_f high = a[i] * (inverse[k] * 0x1p22f);
            if (clips)
                high = least_of(high, six); /* up to 7 rounds to 6 by itself */
            const lanes_f addend = one_and_a_half(most_of((lanes_i)high, one));
            const lanes_f near = clips ? fused(high, all_lanes(0x1p-22f), addend) : fused(a[i], inverse[k], addend);
            const lanes_f d = fused(a[i], inverse[k], addend - near);
            sum[k] = fused(weight ? weight[i] * d : d, d, sum[k]);
        }
    error[0] = sum[0] * (step[0] * step[0]);
    error[1] = sum[1] * (step[1] * step[1]);
}

/* What was tried for eight blocks: every lane's codes and their errors, and the least of them. One lane may go up 15 codes
 * while another goes down 125. */
struct tried {
    lanes_f least;
    int count;
    lanes_f error[SCALE_CODES + 16];
    lanes_i code[SCALE_CODES + 16];
};

static inline __attribute__((always_inline)) void enter(struct tried *t, lanes_f error, lanes_i code)
{
    t->least = least_of(error, t->least);
    t->error[t->count] = error;
    t->code[t->count++] = code;
}

/* plan->step[code], for codes 1..126. */
static inline lanes_f steps_of(const struct pack_plan *plan, lanes_i code)
{
    lanes_f normal = (lanes_f)((code << 20) + all_lanes_i(120 << 23));
    lanes_f small = __builtin_convertvector(code, lanes_f) * 0x1p-9f;
    lanes_f s = pick(code >= 8, normal, small), factor = all_lanes(plan->tensor_scale);
    return plan->encoding == ENCODING_CT ? s / factor : s * factor;
}

/* Where a float's 6 * step surely reaches the amax; at most one code above where it just does. */
static inline lanes_i first_codes(const struct pack_plan *plan, lanes_f top)
{
    const lanes_f reach = top * 1.0000005f;
    lanes_i code = (lanes_i)(top / (6.f * steps_of(plan, all_lanes_i(0x38)))); /* relative to code 0x38, which is 1.0 */
    code = (code >> 20) - all_lanes_i(120 << 3);
    code = pick_i(code < 1, all_lanes_i(1), pick_i(code > 126, all_lanes_i(126), code));
    for (;;) {
        lanes_i short_of = (6.f * steps_of(plan, code) < reach) & (code < 126);
        if (!any_lane(short_of))
            return code;
        code -= short_of; /* a true lane is -1 */
    }
}

/* e4m3_from_clamped of eight values, clamped first. */
static inline lanes_i scale_codes(lanes_f t)
{
    const lanes_i number = t == t;
    t = pick(t > 448.f, all_lanes(448.f), t);
    t = pick(number & (t > 0x1p-9f), t, all_lanes(0x1p-9f));
    const lanes_i u = (lanes_i)t, even = (u >> 20) & 1;
    const lanes_i normal = (u - (120 << 23) + 0x7ffff + even) >> 20, small = (lanes_i)(t + 0x1p14f) - 0x46800000;
    return pick_i(number, pick_i(u < 0x3c800000, small, normal), all_lanes_i(0x7f));
}

/* block_code of eight largest magnitudes; compressed-tensors' rule rounds in the weight's dtype, one after the other. */
static inline lanes_i scales_by_rule(const struct pack_plan *plan, lanes_f top)
{
    lanes_i code;
    if (plan->encoding == ENCODING_CT) {
        for (int b = 0; b < 8; b++)
            code[b] = block_code(plan, top[b]);
        return code;
    }
    lanes_f t;
    if (plan->encoding == ENCODING_STATIC) {
        t = top / 6.f;
        t = pick(t == 0.f, all_lanes(1.f), t) * plan->largest_code / (plan->tensor_amax / 6.f);
    } else {
        t = top / (6.f * plan->tensor_scale);
        t = pick(t == 0.f, all_lanes(1.f), t);
    }
    return scale_codes(t);
}

/* a[column][block], magnitudes; weight[column][block] or NULL. A code for each block, the one that best_code finds. */
static inline __attribute__((always_inline)) lanes_i choose_eight(const struct pack_plan *plan, const lanes_f a[16],
                                                                 const lanes_f *weight, lanes_f top)
{
    const lanes_f infinite = all_lanes(__builtin_inff());
    lanes_f top_weight = all_lanes(1.f), weight_sum = all_lanes(16.f);
    if (weight) {
        weight_sum = top_weight = all_lanes(0.f);
        for (int i = 0; i < 16; i++) {
            weight_sum += weight[i];
            top_weight = pick((a[i] == top) & (weight[i] > top_weight), weight[i], top_weight);
        }
    }
    /* Each |x| - q * step is off by under 4 roundings of amax, less than `delta`. So the root of a sum of weight * d^2 is off by
     * at most delta * sqrt(weight_sum) (triangle inequality), and the sum's own roundings stay under 2^-19 of it. */
    const lanes_f delta = top * 0x1p-21f, reach = 2.5f * delta * root(weight_sum);
    struct tried tried;
    tried.least = infinite;
    tried.count = 0;
    if (plan->choice == CHOICE_FOUR_OVER_SIX) {
        const lanes_i six = scales_by_rule(plan, top), four = scales_by_rule(plan, top * 1.5f);
        const lanes_f step[2] = {steps_of(plan, six), steps_of(plan, four)};
        lanes_f error[2];
        float_errors(a, weight, step, true, error);
        enter(&tried, error[0], six);
        enter(&tried, pick(six == four, infinite, error[1]), four); /* the same code twice is no contest */
    } else {
        const lanes_i first = first_codes(plan, top), upper = first + 7;
        const lanes_i last = pick_i(upper > 126, all_lanes_i(126), most_of(upper, all_lanes_i(15)));
        /* Beyond the largest code the top values clip going up, too. */
        const bool clips = any_lane(6.f * steps_of(plan, first) < top);
        for (lanes_i code = first; any_lane(code <= last); code += 2) {
            const lanes_i held[2] = {pick_i(code <= last, code, last), pick_i(code < last, code + 1, last)};
            const lanes_f step[2] = {steps_of(plan, held[0]), steps_of(plan, held[1])};
            lanes_f error[2];
            if (clips)
                float_errors(a, weight, step, true, error);
            else
                float_errors(a, weight, step, false, error);
            enter(&tried, pick(code <= last, error[0], infinite), held[0]);
            enter(&tried, pick(code < last, error[1], infinite), held[1]);
        }
        for (lanes_i code = first - 1;; code -= 2) {
            const lanes_i held[2] = {most_of(code, all_lanes_i(1)), most_of(code - 1, all_lanes_i(1))};
            const lanes_f step[2] = {steps_of(plan, held[0]), steps_of(plan, held[1])};
            const lanes_f limit = root(tried.least) + reach; /* surely above the root of the exact error of the best */
            lanes_f error[2];
            lanes_i open[2];
            for (int k = 0; k < 2; k++) {
                lanes_f clipped = top - 6.f * step[k] - delta;
                clipped = pick(clipped > 0.f, clipped, all_lanes(0.f));
                open[k] = (code > k) & (top_weight * (clipped * clipped) <= limit * limit * 1.0001f);
            }
            if (!any_lane(open[0]))
                break;
            float_errors(a, weight, step, true, error);
            enter(&tried, pick(open[0], error[0], infinite), held[0]);
            enter(&tried, pick(open[1], error[1], infinite), held[1]);
        }
    }
    /* Floats neither over- nor underflow in here only in a middle range. */
    const lanes_f unit = weight_sum * (delta * delta);
    const lanes_f finest = steps_of(plan, all_lanes_i(1)), quotient = top / finest;
    const lanes_i ranged = (top > 1e-12f) & (top < 1e12f) & (unit > 1e-36f) & (unit < 1e22f) & (finest > 1e-18f) & (finest < 1e12f) &
                           (quotient < 1e15f) & (quotient * quotient * (weight_sum + 1.f) < 1e36f);
    const lanes_f near = root(tried.least) * 1.00001f + reach, bound = near * near * 1.00001f;
    lanes_i close = all_lanes_i(0), best = all_lanes_i(0);
    for (int k = 0; k < tried.count; k++) {
        close -= tried.error[k] <= bound;
        best = pick_i(tried.error[k] == tried.least, tried.code[k], best);
    }
    for (int b = 0; b < 8; b++) {
        if (ranged[b] && close[b] == 1)
            continue;
        float x[16], w[16];
        for (int i = 0; i < 16; i++) {
            x[i] = a[i][b];
            w[i] = weight ? weight[i][b] : 1.f;
        }
        if (!ranged[b] || plan->choice != CHOICE_SWEEP) {
            best[b] = best_code(plan, x, weight ? w : NULL);
            continue;
        }
        struct contest contest = {plan, x, weight ? w : NULL, -1., 0};
        for (int k = 0; k < tried.count; k++)
            if (tried.error[k][b] <= bound[b])
                contest_enter(&contest, tried.code[k][b]);
        best[b] = contest.code;
    }
    return best;
}

#endif
