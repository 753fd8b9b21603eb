/* Eight blocks of 16 at once, a lane each: the search of search.c in float, exact where floats cannot tell.
 *
 * Written with the compiler's vector types, so that one text serves every SIMD variant; each includes it for itself.
 * A float error of a code differs from the exact one by at most `slack` of it (below). A block whose two best codes lie
 * closer than that is decided by best_code, in double; so the choice is always that of search.c.
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

/* Sum over the 16 columns of weight * (a - nearest grid point)^2. The nearest point comes from an addend whose last bit is
 * worth half a step of the value's binade: 1.5 * 2^22 times the binade, at least 1.5 * 2^22. */
static inline __attribute__((always_inline)) lanes_f float_error(const lanes_f a[16], const lanes_f *weight, lanes_f step, bool clips)
{
    const lanes_f inverse = all_lanes(1.f) / step, six = all_lanes(6.f);
    const lanes_i exponent = all_lanes_i(0x7f800000), one = all_lanes_i(0x3f800000), lift = all_lanes_i(0x0b400000);
    lanes_f sum = all_lanes(0.f);
    for (int i = 0; i < 16; i++) {
        lanes_f r = a[i] * inverse;
        lanes_f c = clips ? least_of(r, six) : r; /* up to 7 rounds to 6 by itself */
        lanes_f addend = (lanes_f)(most_of((lanes_i)c & exponent, one) + lift);
        lanes_f d = r - ((c + addend) - addend);
        sum += weight ? weight[i] * (d * d) : d * d;
    }
    return sum * (step * step);
}

struct race {
    lanes_f least, second;
    lanes_i best;
};

static inline void enter(struct race *race, lanes_f error, lanes_i code)
{
    lanes_i wins = error < race->least;
    race->second = pick(wins, race->least, pick(error < race->second, error, race->second));
    race->least = pick(wins, error, race->least);
    race->best = pick_i(wins, code, race->best);
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

/* a[column][block], magnitudes; weight[column][block] or NULL. Writes a code a block and returns 0 where it is not sure. */
static inline __attribute__((always_inline)) lanes_i choose_eight(const struct pack_plan *plan, const lanes_f a[16],
                                                                 const lanes_f *weight, lanes_f top, lanes_i *codes)
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
    /* Each |x| - q * step is off by under 4 roundings of amax, each sum by 20 roundings of itself; by Cauchy-Schwarz the
     * sum of weight * d^2 moves by at most 2 * delta * sqrt(weight_sum * sum) + weight_sum * delta^2. Below `floor` a sum is
     * too small to be known at all; above it, it is known to a thirtieth. */
    const lanes_f delta = top * 0x1p-21f;
    struct race race = {infinite, infinite, all_lanes_i(0)};
    if (plan->choice == CHOICE_FOUR_OVER_SIX) {
        lanes_i six, four;
        for (int b = 0; b < 8; b++) {
            six[b] = block_code(plan, top[b]);
            four[b] = block_code(plan, top[b] * 1.5f);
        }
        enter(&race, float_error(a, weight, steps_of(plan, six), true), six);
        /* The same code twice is no contest. */
        lanes_f error = float_error(a, weight, steps_of(plan, four), true);
        enter(&race, pick(six == four, infinite, error), four);
    } else {
        const lanes_i first = first_codes(plan, top), upper = first + 7;
        const lanes_i last = pick_i(upper > 126, all_lanes_i(126), most_of(upper, all_lanes_i(15)));
        /* Beyond the largest code the top values clip going up, too. */
        const bool clips = any_lane(6.f * steps_of(plan, first) < top);
        for (lanes_i code = first; any_lane(code <= last); code += 1) {
            lanes_i held = pick_i(code <= last, code, last);
            lanes_f step = steps_of(plan, held);
            lanes_f error = clips ? float_error(a, weight, step, true) : float_error(a, weight, step, false);
            enter(&race, pick(code <= last, error, infinite), held);
        }
        for (lanes_i code = first - 1;; code -= 1) {
            lanes_i held = most_of(code, all_lanes_i(1));
            lanes_f step = steps_of(plan, held), clipped = top - 6.f * step - delta;
            clipped = pick(clipped > 0.f, clipped, all_lanes(0.f));
            /* Room for what `least` may be off by, given that it is above `floor`. */
            lanes_i open = (code >= 1) & (top_weight * (clipped * clipped) <= race.least * 1.1f);
            if (!any_lane(open))
                break;
            enter(&race, pick(open, float_error(a, weight, step, true), infinite), held);
        }
    }
    *codes = race.best;
    lanes_f slack = 4.f * delta * root(weight_sum * race.second) + 2.f * weight_sum * delta * delta;
    slack += race.second * 0x1p-18f;
    lanes_f floor = 4096.f * weight_sum * delta * delta;
    /* Floats neither over- nor underflow in here only in a middle range. */
    return (race.second - race.least > slack) & (race.least > floor) & (top > 1e-12f) & (top < 1e12f);
}

#endif
