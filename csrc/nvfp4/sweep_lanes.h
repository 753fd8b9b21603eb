/* Eight blocks of 16 at once, a lane each: the search of search.c in float, exact where floats cannot tell.
 *
 * Written with the compiler's vector types, so that one text serves every SIMD variant; each includes it for itself.
 * A float error of a code differs from the exact one by at most `slack` of it (below). A block whose two best codes lie
 * closer than that is decided by best_code, in double; so the choice is always that of search.c.
 */
#ifndef AQ_NVFP4_SWEEP_LANES_H
#define AQ_NVFP4_SWEEP_LANES_H

#include "codec.h"

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

static inline lanes_f all_lanes(float f)
{
    return (lanes_f){f, f, f, f, f, f, f, f};
}

static inline bool any_lane(lanes_i mask)
{
    typedef int64_t wide __attribute__((vector_size(32)));
    wide w = (wide)mask;
    return (w[0] | w[1] | w[2] | w[3]) != 0;
}

/* Sum over the 16 columns of weight * (a - nearest grid point)^2. The nearest point comes from the addend trick: the last
 * bit of 1.5 * 2^22 * binade is worth half a step of that binade. */
static inline lanes_f float_error(const lanes_f a[16], const lanes_f *weight, lanes_f step)
{
    const lanes_f one = all_lanes(1.f), inverse = one / step;
    const lanes_i exponent = (lanes_i)all_lanes(__builtin_inff());
    lanes_f sum = all_lanes(0.f);
    for (int i = 0; i < 16; i++) {
        lanes_f r = a[i] * inverse;
        lanes_f c = pick(r < 6.f, r, all_lanes(6.f));
        lanes_f binade = (lanes_f)((lanes_i)c & exponent);
        lanes_f addend = pick(binade > one, binade, one) * 0x1.8p22f;
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

static inline lanes_f steps_of(const struct pack_plan *plan, lanes_i code)
{
    lanes_f s;
    for (int b = 0; b < 8; b++)
        s[b] = plan->step[code[b]];
    return s;
}

/* v[block][column]; writes a code a block. */
static inline void choose_eight(const struct pack_plan *plan, float v[8][16], const float amax[8],
                                const float *const weight[8], uint8_t *scales)
{
    const lanes_f infinite = all_lanes(__builtin_inff());
    lanes_f a[16], w[16], top;
    for (int b = 0; b < 8; b++)
        top[b] = amax[b];
    for (int i = 0; i < 16; i++)
        for (int b = 0; b < 8; b++)
            a[i][b] = v[b][i] < 0 ? -v[b][i] : v[b][i];
    lanes_f top_weight = all_lanes(1.f), weight_sum = all_lanes(16.f);
    if (plan->weight) {
        weight_sum = top_weight = all_lanes(0.f);
        for (int i = 0; i < 16; i++) {
            for (int b = 0; b < 8; b++)
                w[i][b] = weight[b][i];
            weight_sum += w[i];
            top_weight = pick((a[i] == top) & (w[i] > top_weight), w[i], top_weight);
        }
    }
    const lanes_f *ws = plan->weight ? w : NULL;
    /* Each |x| - q * step is off by under 4 roundings of amax, each sum by 20 roundings of itself; by Cauchy-Schwarz the
     * sum of weight * d^2 moves by at most 2 * delta * sqrt(weight_sum * sum) + weight_sum * delta^2. Below `floor` a sum is
     * too small to be known at all; above it, it is known to a thirtieth. */
    const lanes_f delta = top * 0x1p-21f;
    struct race race = {infinite, infinite, (lanes_i)all_lanes(0.f)};
    lanes_i first;
    if (plan->choice == CHOICE_FOUR_OVER_SIX) {
        lanes_i four;
        for (int b = 0; b < 8; b++) {
            first[b] = block_code(plan, amax[b]);
            four[b] = block_code(plan, amax[b] * 1.5f);
        }
        enter(&race, float_error(a, ws, steps_of(plan, first)), first);
        /* The same code twice is no contest. */
        lanes_f error = float_error(a, ws, steps_of(plan, four));
        enter(&race, pick(first == four, infinite, error), four);
    } else {
        lanes_i last;
        for (int b = 0; b < 8; b++) {
            uint8_t c = block_code(plan, amax[b]); /* the wanted code or a neighbour */
            c = c > 1 ? (uint8_t)(c - 1) : c;
            while (c < 126 && 6.0 * plan->step[c] < amax[b])
                c++;
            while (c > 1 && 6.0 * plan->step[c - 1] >= amax[b])
                c--;
            first[b] = c;
            int l = c + 7 > 15 ? c + 7 : 15;
            last[b] = l > 126 ? 126 : l;
        }
        for (lanes_i code = first; any_lane(code <= last); code += 1) {
            lanes_i held = pick_i(code <= last, code, last);
            lanes_f error = float_error(a, ws, steps_of(plan, held));
            enter(&race, pick(code <= last, error, infinite), held);
        }
        for (lanes_i code = first - 1;; code -= 1) {
            lanes_i held = pick_i(code >= 1, code, (lanes_i){1, 1, 1, 1, 1, 1, 1, 1});
            lanes_f step = steps_of(plan, held), clipped = top - 6.f * step - delta;
            clipped = pick(clipped > 0.f, clipped, all_lanes(0.f));
            /* Room for what `least` may be off by, given that it is above `floor` (below). */
            lanes_i open = (code >= 1) & (top_weight * (clipped * clipped) <= race.least * 1.1f);
            if (!any_lane(open))
                break;
            enter(&race, pick(open, float_error(a, ws, step), infinite), held);
        }
    }
    lanes_f slack;
    for (int b = 0; b < 8; b++)
        slack[b] = __builtin_sqrtf(weight_sum[b] * race.second[b]);
    slack = 4.f * delta * slack + 2.f * weight_sum * delta * delta + race.second * 0x1p-18f;
    lanes_f floor = 4096.f * weight_sum * delta * delta;
    /* Floats neither over- nor underflow in here only in a middle range. */
    lanes_i sure = (race.second - race.least > slack) & (race.least > floor) & (top > 1e-12f) & (top < 1e12f);
    for (int b = 0; b < 8; b++)
        scales[b] = sure[b] ? (uint8_t)race.best[b] : best_code(plan, v[b], weight[b]);
}

#endif
