/* The searches of kq_search.c with one lane per sub-block: each lane does the same operations in the same order.
 *
 * One source for all variants (lanes.h). Branches become selections between both results, so a lane that has finished continues and its
 * results are dropped.
 */
#ifndef AQ_NVFP4_KQ_LANES_H
#define AQ_NVFP4_KQ_LANES_H

#include "kq_decode.h"
#include "lanes.h"

static inline i32v within(i32v v, int low, int high)
{
    return least_of_i(most_of_i(v, all_lanes_i(low)), all_lanes_i(high));
}

/* Like nearest_int, bit for bit. */
static inline i32v nearest_ints(f32v f)
{
    return ((i32v)(f + 12582912.f) & 0x7fffff) - 0x400000;
}

/* Transpose the rows of a lane: in[lane * n + i] to out[i][lane]. */
static inline void columns_of(const float *in, int n, f32v *out)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < LANES; j++)
            out[i][j] = in[j * n + i];
}

static inline void affine_lanes(const float *x_rows, const float *weight_rows, int top, float low, float by, int tries, int weighted,
                                uint8_t *L, struct affine *out)
{
    enum { N = 32 };
    f32v x[N], weight[N];
    i32v best_codes[N], tried[N];
    columns_of(x_rows, N, x);
    columns_of(weight_rows, N, weight);
    f32v min = x[0], max = x[0], sum_w = weight[0], sum_x = sum_w * x[0];
    for (int i = 1; i < N; i++) {
        min = pick(x[i] < min, x[i], min);
        max = pick(x[i] > max, x[i], max);
        sum_w += weight[i];
        sum_x += weight[i] * x[i];
    }
    min = pick(min > 0.f, all_lanes(0), min);
    const i32v flat = weighted ? max <= min : max == min;
    f32v inverse = (float)top / (max - min), scale = 1.f / inverse, least = all_lanes(0);
    const f32v start = min;
    for (int i = 0; i < N; i++) {
        best_codes[i] = within(nearest_ints(inverse * (x[i] - min)), 0, top);
        f32v diff = scale * to_floats(best_codes[i]) + min - x[i];
        least += weight[i] * (diff * diff);
    }
    for (int t = 0; t <= tries; t++) {
        f32v sum_l = all_lanes(0), sum_l2 = all_lanes(0), sum_xl = all_lanes(0);
        inverse = (low + by * (float)t + (float)top) / (max - min);
        for (int i = 0; i < N; i++) {
            f32v v = inverse * (x[i] - min);
            if (weighted)
                tried[i] = pick_i(v > 0.f, nearest_ints(pick(v < (float)top, v, all_lanes((float)top))), all_lanes_i(0));
            else
                tried[i] = within(nearest_ints(v), 0, top);
            f32v l = to_floats(tried[i]), wl = weight[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        f32v det = sum_w * sum_l2 - sum_l * sum_l;
        f32v this_scale = (sum_w * sum_xl - sum_x * sum_l) / det, this_min = (sum_l2 * sum_x - sum_l * sum_xl) / det;
        const i32v above = this_min > 0.f;
        this_min = pick(above, all_lanes(0), this_min);
        this_scale = pick(above, sum_xl / sum_l2, this_scale);
        f32v error = all_lanes(0);
        for (int i = 0; i < N; i++) {
            f32v diff = this_scale * to_floats(tried[i]) + this_min - x[i];
            error += weight[i] * (diff * diff);
        }
        const i32v better = (det > 0.f) & (error < least);
        if (!any_lane(better))
            continue;
        for (int i = 0; i < N; i++)
            best_codes[i] = pick_i(better, tried[i], best_codes[i]);
        least = pick(better, error, least);
        scale = pick(better, this_scale, scale);
        min = pick(better, this_min, min);
    }
    for (int j = 0; j < LANES; j++) {
        for (int i = 0; i < N; i++)
            L[j * N + i] = flat[j] ? 0 : (uint8_t)best_codes[i][j];
        out[j] = flat[j] ? (struct affine){0.f, -start[j]} : (struct affine){scale[j], -min[j]};
    }
}

/* LANES sub-blocks of 16, codes -32..31. */
static inline void symmetric_lanes(const float *x_rows, const float *weight_rows, uint8_t *L, float *out)
{
    enum { N = 16, TOP = 32 };
    f32v x[N], wx[N], weight[N];
    columns_of(x_rows, N, x);
    if (weight_rows)
        columns_of(weight_rows, N, weight);
    f32v amax = all_lanes(0), extreme = all_lanes(0);
    for (int i = 0; i < N; i++) {
        if (!weight_rows)
            weight[i] = x[i] * x[i];
        wx[i] = weight[i] * x[i];
        f32v a = pick(x[i] < 0.f, -x[i], x[i]);
        extreme = pick(a > amax, x[i], extreme);
        amax = pick(a > amax, a, amax);
    }
    const i32v zero = amax < 1e-15f;
    f32v scale = all_lanes(0), best = all_lanes(0), chosen = all_lanes(0);
    for (int t = -10; t <= 9; t++) {
        if (t == 0)
            continue;
        f32v inverse = (t == -10 ? -(float)TOP : -(TOP + 0.1f * (float)t)) / extreme;
        f32v sum_xl = all_lanes(0), sum_l2 = all_lanes(0);
        for (int i = 0; i < N; i++) {
            f32v l = to_floats(within(nearest_ints(inverse * x[i]), -TOP, TOP - 1));
            sum_xl += wx[i] * l;
            sum_l2 += weight[i] * l * l;
        }
        f32v ratio = sum_xl / sum_l2;
        i32v better = (sum_l2 > 0.f) & (sum_xl * sum_xl > best * sum_l2);
        if (t == -10) {
            better = all_lanes_i(-1);
            ratio = pick(sum_l2 != 0.f, ratio, all_lanes(0));
        }
        scale = pick(better, ratio, scale);
        best = pick(better, ratio * sum_xl, best);
        chosen = pick(better, inverse, chosen);
    }
    for (int i = 0; i < N; i++) {
        i32v code = within(nearest_ints(chosen * x[i]), -TOP, TOP - 1) + TOP;
        for (int j = 0; j < LANES; j++)
            L[j * N + i] = zero[j] ? 0 : (uint8_t)code[j];
    }
    for (int j = 0; j < LANES; j++)
        out[j] = zero[j] ? 0.f : scale[j];
}

static void affine_8(const float *x, const float *weight, int top, float low, float by, int tries, int weighted, uint8_t *L,
                     struct affine *out)
{
    for (int j = 0; j < 8; j += LANES) {
        if (weighted)
            affine_lanes(x + 32 * j, weight + 32 * j, top, low, by, tries, 1, L + 32 * j, out + j);
        else
            affine_lanes(x + 32 * j, weight + 32 * j, top, low, by, tries, 0, L + 32 * j, out + j);
    }
}

static void symmetric_16(const float *x, const float *weight, uint8_t *L, float *scale)
{
    for (int j = 0; j < 16; j += LANES)
        symmetric_lanes(x + 16 * j, weight ? weight + 16 * j : NULL, L + 16 * j, scale + j);
}

#endif
