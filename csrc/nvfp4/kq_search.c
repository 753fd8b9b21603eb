/* Reference searches for the scale and minimum of one sub-block, as in llama.cpp's quantizer.
 *
 * affine: w = scale * q + min with min <= 0. Start from the range, then try `tries + 1` finer or coarser steps, solve the weighted
 * least squares for each rounding, and use a result if it lowers the weighted squared error.
 * symmetric: w = scale * q; 18 steps around -top / (element of largest magnitude); largest (sum w x q)^2 / sum w q^2.
 */
#include "kquant.h"

#include <math.h>

/* Round to nearest even by addition, as ggml does, for any float including NaN. */
int nearest_int(float f)
{
    return (int)(float_bits(f + 12582912.f) & 0x7fffffu) - 0x400000;
}

static int clip(int v, int low, int high)
{
    return v < low ? low : v > high ? high : v;
}

static struct affine affine_one(const float *x, const float *weight, int top, float low, float by, int tries, int weighted, uint8_t *L)
{
    enum { N = 32 };
    float min = x[0], max = x[0], sum_w = weight[0], sum_x = sum_w * x[0];
    for (int i = 1; i < N; i++) {
        min = x[i] < min ? x[i] : min;
        max = x[i] > max ? x[i] : max;
        sum_w += weight[i];
        sum_x += weight[i] * x[i];
    }
    if (min > 0)
        min = 0;
    if (weighted ? max <= min : max == min) {
        memset(L, 0, N);
        return (struct affine){0.f, -min};
    }
    float inverse = (float)top / (max - min), scale = 1 / inverse, least = 0;
    for (int i = 0; i < N; i++) {
        L[i] = (uint8_t)clip(nearest_int(inverse * (x[i] - min)), 0, top);
        float diff = scale * L[i] + min - x[i];
        least += weight[i] * (diff * diff);
    }
    for (int t = 0; t <= tries; t++) {
        uint8_t tried[N];
        float sum_l = 0, sum_l2 = 0, sum_xl = 0;
        inverse = (low + by * t + top) / (max - min); /* min is the best so far, as in llama.cpp */
        for (int i = 0; i < N; i++) {
            float v = inverse * (x[i] - min);
            int l = weighted ? (v > 0 ? nearest_int(v < top ? v : (float)top) : 0) : clip(nearest_int(v), 0, top);
            tried[i] = (uint8_t)l;
            float wl = weight[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        float det = sum_w * sum_l2 - sum_l * sum_l;
        if (!(det > 0))
            continue;
        float this_scale = (sum_w * sum_xl - sum_x * sum_l) / det;
        float this_min = (sum_l2 * sum_x - sum_l * sum_xl) / det;
        if (this_min > 0) {
            this_min = 0;
            this_scale = sum_xl / sum_l2;
        }
        float error = 0;
        for (int i = 0; i < N; i++) {
            float diff = this_scale * tried[i] + this_min - x[i];
            error += weight[i] * (diff * diff);
        }
        if (error < least) {
            memcpy(L, tried, N);
            least = error;
            scale = this_scale;
            min = this_min;
        }
    }
    return (struct affine){scale, -min};
}

void serial_affine_8(const float *x, const float *weight, int top, float low, float by, int tries, int weighted, uint8_t *L,
                     struct affine *out)
{
    for (int j = 0; j < 8; j++)
        out[j] = affine_one(x + 32 * j, weight + 32 * j, top, low, by, tries, weighted, L + 32 * j);
}

float search_symmetric(int n, int top, const float *x, const float *weight, uint8_t *L)
{
    float amax = 0, extreme = 0;
    for (int i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        if (a > amax) {
            amax = a;
            extreme = x[i];
        }
    }
    if (amax < 1e-15f) {
        memset(L, 0, (size_t)n);
        return 0.f;
    }
    float scale = 0, best = 0;
    for (int t = -10; t <= 9; t++) {
        /* First the plain step, then nine finer and nine coarser ones. */
        if (t == 0)
            continue;
        float inverse = t == -10 ? -top / extreme : -(top + 0.1f * t) / extreme;
        float sum_xl = 0, sum_l2 = 0;
        for (int i = 0; i < n; i++) {
            int l = clip(nearest_int(inverse * x[i]), -top, top - 1);
            float w = weight ? weight[i] : x[i] * x[i];
            sum_xl += w * x[i] * l;
            sum_l2 += w * l * l;
        }
        if (t == -10) {
            scale = sum_l2 != 0 ? sum_xl / sum_l2 : 0.f;
        } else if (sum_l2 > 0 && sum_xl * sum_xl > best * sum_l2) {
            scale = sum_xl / sum_l2;
        } else {
            continue;
        }
        best = scale * sum_xl;
        for (int i = 0; i < n; i++)
            L[i] = (uint8_t)(clip(nearest_int(inverse * x[i]), -top, top - 1) + top);
    }
    return scale;
}

void serial_symmetric_16(const float *x, const float *weight, uint8_t *L, float *scale)
{
    for (int j = 0; j < 16; j++)
        scale[j] = search_symmetric(16, 32, x + 16 * j, weight ? weight + 16 * j : NULL, L + 16 * j);
}
