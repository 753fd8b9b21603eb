/* The scale code with the least squared error of a block.
 *
 * The error of a code is the sum, in column order and in double, of weight * (|x| - nearest grid point)^2, with the nearest of
 * {0 .. 6} * step. Products of a grid value and a step are exact in double, so only the sum rounds.
 *
 * Why not all 126 codes are tried: let u be the first code whose 6 * step reaches amax. For c >= u and c >= 8 the code c + 8 has twice the
 * step, and its grid up to amax is a subset of c's; each term, and so each rounded sum, is at least as large, so c + 8 never wins.
 * Therefore nothing above max(u + 7, 15) wins. Below u the largest element is clipped, and from some code downwards its term alone
 * exceeds the best error. Equal errors: the code with the lower error without weights wins, then the lower code.
 */
#include "codec.h"

static double squared_error(const float *x, const float *weight, int group, float step_of_code)
{
    double sum = 0, step = step_of_code;
    for (int i = 0; i < group; i++) {
        double a = x[i] < 0 ? -(double)x[i] : (double)x[i];
        unsigned k = 0;
        for (unsigned m = 0; m < 7; m++)
            k += a > E2M1_MIDPOINT[m] * step;
        double d = a - E2M1_VALUE[k] * step;
        sum += weight ? weight[i] * (d * d) : d * d;
    }
    return sum;
}

void best_search_try(struct best_search *c, int code)
{
    const double error = squared_error(c->x, c->weight, c->plan->group, c->plan->step[code]);
    if (c->least >= 0 && error > c->least)
        return;
    /* Columns of importance 0 decide among codes that are equal for the others. */
    const double plain = c->weight ? squared_error(c->x, NULL, c->plan->group, c->plan->step[code]) : error;
    if (c->least < 0 || error < c->least || plain < c->least_plain || (plain == c->least_plain && code < c->code)) {
        c->least = error;
        c->least_plain = plain;
        c->code = code;
    }
}

static uint8_t best_of_two(const struct pack_plan *plan, const float *x, const float *weight, float amax)
{
    uint8_t six = block_code(plan, amax), four = block_code(plan, amax * 1.5f);
    double with_six = squared_error(x, weight, plan->group, plan->step[six]);
    double with_four = squared_error(x, weight, plan->group, plan->step[four]);
    return with_four < with_six ? four : six;
}

static uint8_t best_of_all(const struct pack_plan *plan, const float *x, const float *weight, float amax, double top_weight)
{
    int first = 1;
    while (first < 126 && 6.0 * plan->step[first] < amax)
        first++;
    int last = first + 7 > 15 ? first + 7 : 15;
    if (last > 126)
        last = 126;
    struct best_search search = {plan, x, weight, -1., 0., 0};
    for (int c = first; c <= last; c++)
        best_search_try(&search, c);
    for (int c = first - 1; c >= 1; c--) {
        double clipped = amax - 6.0 * plan->step[c];
        if (top_weight * (clipped * clipped) > search.least)
            break;
        best_search_try(&search, c);
    }
    return (uint8_t)search.code;
}

uint8_t best_code(const struct pack_plan *plan, const float *x, const float *weight)
{
    uint32_t top = 0; /* bit patterns are ordered like magnitudes, with NaN above all, so one NaN is enough */
    double top_weight = 1;
    for (int i = 0; i < plan->group; i++) {
        uint32_t bits = float_bits(x[i]) & 0x7fffffffu;
        if (bits > top) {
            top = bits;
            top_weight = weight ? weight[i] : 1;
        }
    }
    const float amax = bits_float(top);
    if (amax == 0 || !(amax <= 0x1.fffffep127f)) /* no choice: zeros, infinity or NaN */
        return block_code(plan, amax);
    return plan->choice == CHOICE_SWEEP ? best_of_all(plan, x, weight, amax, top_weight) : best_of_two(plan, x, weight, amax);
}
