/* The tables of one pack: the factor of each scale code, and the bit pattern from which on each element code applies.
 *
 * x / step never decreases as |x| grows, so "the index of |x| is at least i" is a threshold on the bits of |x|. Computing 7 thresholds
 * per code with true divisions replaces the division of every element and gives the same bytes: multiplying by a reciprocal would
 * differ on near-ties.
 */
#include "codec.h"

static float magnitude_of(uint32_t bits, int kind)
{
    return kind == KIND_F32 ? bits_float(bits) : kind == KIND_F16 ? f16_to_float((uint16_t)bits) : bf16_to_float((uint16_t)bits);
}

static uint32_t bits_near(float f, int kind)
{
    uint32_t mask = magnitude_mask(kind);
    return mask & (kind == KIND_F32 ? float_bits(f) : kind == KIND_F16 ? float_to_f16(f) : float_to_bf16(f));
}

static bool reaches(uint32_t bits, int kind, float step, unsigned i)
{
    float a = magnitude_of(bits, kind) / step;
    if (i == 8)
        return a > 0.f;
    return i % 2 ? !(a <= E2M1_MIDPOINT[i - 1]) : !(a < E2M1_MIDPOINT[i - 1]); /* ties to even, NaN is 7 */
}

/* The smallest |bits| that reach i (8: a sign is stored); one after the largest pattern if there is none. */
static uint32_t find_threshold(int kind, float step, unsigned i)
{
    uint32_t past = magnitude_mask(kind) + 1;
    float guess = i == 8 ? 0.f : E2M1_MIDPOINT[i - 1] * step;
    uint32_t t = guess == guess ? bits_near(guess, kind) : 0;
    uint32_t inf = first_nonfinite(kind);
    if (t > inf)
        t = inf;
    if (t > 0 && t < inf) { /* nearly always it is t or the next one: three independent divisions, no branch to predict */
        const bool before = reaches(t - 1, kind, step, i), here = reaches(t, kind, step, i);
        if (!before & reaches(t + 1, kind, step, i))
            return t + !here;
    }
    /* All NaN patterns have index 7, and infinity reaches every index that can be reached. */
    if (!reaches(inf, kind, step, i))
        return i == 8 ? past : inf + 1;
    for (uint32_t stride = 1; t > 0 && reaches(t - 1, kind, step, i); stride *= 2)
        t = t > stride ? t - stride : 0;
    if (reaches(t, kind, step, i))
        return t;
    /* Not reached at t: gallop up, then bisect. */
    uint32_t low = t, high = t;
    for (uint32_t stride = 1; !reaches(high, kind, step, i); stride *= 2) {
        low = high;
        high = inf - high > stride ? high + stride : inf;
    }
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (reaches(middle, kind, step, i))
            high = middle;
        else
            low = middle;
    }
    return high;
}

static void set_above(uint32_t above[8], int kind, unsigned i, uint32_t bits)
{
    static const uint8_t of_pair[4] = {4, 2, 6, 8};
    const unsigned slot = ABOVE_SLOT[i - 1];
    if (kind == KIND_F32) {
        above[slot] = bits;
        return;
    }
    const uint16_t half = (uint16_t)bits;
    memcpy((uint8_t *)above + slot * sizeof half, &half, sizeof half);
    for (unsigned k = 0; k < 4; k++)
        if (of_pair[k] == i)
            above[ABOVE_PAIRS + k] = (bits & 0xffffu) * 0x10001u;
}

/* In an octave of 128 patterns the thresholds of 1.25, 2.5 and 5 steps are at the same place, those of 1.75 and 3.5 between 51 and 73
 * patterns above, and .75 and .25 far below. So with boundaries 32 patterns below the threshold of 1.25 no window of 64 has two. Ten
 * windows reach from below the lowest threshold to the highest. Returns false if not: near the smallest and largest patterns of all. */
static bool build_windows(struct code_windows *w, const uint32_t threshold[9])
{
    enum { WINDOW_SIZE = 64, UNDER = 32 + 5 * WINDOW_SIZE };
    if (threshold[3] < UNDER || threshold[7] >= first_nonfinite(KIND_BF16) || threshold[8] != 1)
        return false;
    const uint32_t bottom = threshold[3] - UNDER;
    unsigned last = 0; /* window of the threshold before */
    for (unsigned i = 1, window = 0; i <= 8; i++) {
        const uint32_t at = i == 8 ? 16 * WINDOW_SIZE : threshold[i] - bottom;
        if (i < 8 && (threshold[i] <= bottom || at >= 15 * WINDOW_SIZE || (i > 1 && at / WINDOW_SIZE == last)))
            return false;
        for (; window < at / WINDOW_SIZE; window++) { /* the windows before this threshold's that are not filled yet */
            w->base[window] = (uint8_t)(i - 1);
            w->last_below[window] = WINDOW_SIZE;
        }
        if (i == 8)
            break;
        last = window;
        w->base[window] = (uint8_t)(i - 1);
        w->last_below[window++] = (int8_t)((int)(at % WINDOW_SIZE) - 1);
    }
    for (int k = 0; k < 8; k++)
        w->bottom[k] = (uint16_t)bottom;
    return true;
}

void plan_prepare(struct pack_plan *plan)
{
    plan->has_windows = plan->kind == KIND_BF16;
    memset(plan->windows, 0, sizeof plan->windows[0]);
    memset(plan->windows + SCALE_CODES - 1, 0, sizeof plan->windows[0]);
    for (int c = 0; c < SCALE_CODES; c++) {
        float s = e4m3_to_float((uint8_t)c);
        plan->step[c] = plan->encoding == ENCODING_CT ? s / plan->tensor_scale : s * plan->tensor_scale;
        uint32_t threshold[9];
        for (unsigned i = 1; i <= 8; i++) {
            threshold[i] = find_threshold(plan->kind, plan->step[c], i);
            set_above(plan->above[c], plan->kind, i, threshold[i] - 1);
        }
        if (c > 0 && c < SCALE_CODES - 1) /* no block has the code 0, and only one with a NaN has the NaN code */
            plan->has_windows = plan->has_windows && build_windows(plan->windows + c, threshold);
    }
}

void unpack_prepare(struct unpack_plan *plan)
{
    for (int c = 0; c < 256; c++) {
        float s = e4m3_to_float((uint8_t)c), step = plan->divides ? s / plan->tensor_scale : s * plan->tensor_scale;
        /* A product with a NaN has the sign of the NaN in some variants: so the step of 0xFF is that of 0x7F. */
        plan->step[c] = step == step ? step : bits_float(0x7fc00000u);
        for (int i = 0; plan->kind != KIND_F32 && i < 16; i++) {
            const float v = decoded((unsigned)i, step);
            const uint16_t bits = plan->kind == KIND_F16 ? float_to_f16(v) : float_to_bf16(v);
            plan->value[c][i] = (uint8_t)bits;
            plan->value[c][16 + i] = (uint8_t)(bits >> 8);
        }
    }
}

/* min before max, so that NaN passes through as in torch.clamp. */
static float clamp(float t, float low, float high)
{
    t = t > high ? high : t;
    return t < low ? low : t;
}

uint8_t block_code(const struct pack_plan *plan, float amax)
{
    float t;
    uint8_t code;
    switch (plan->encoding) {
    case ENCODING_CT:
        /* The observer computes in the weight's dtype. */
        t = amax / 6.f;
        if (plan->kind == KIND_BF16)
            t = bf16_to_float(float_to_bf16(t));
        else if (plan->kind == KIND_F16)
            t = f16_to_float(float_to_f16(t));
        code = e4m3_from_clamped(clamp(plan->tensor_scale * t, 0.f, 448.f));
        return code == 0 ? 0x20 : code;
    case ENCODING_STATIC:
        t = amax / 6.f;
        t = (t == 0.f ? 1.f : t) * plan->largest_code / (plan->tensor_amax / 6.f);
        break;
    default:
        t = amax / (6.f * plan->tensor_scale);
        if (t == 0.f)
            t = 1.f;
    }
    return e4m3_from_clamped(clamp(t, 0x1p-9f, 448.f));
}
