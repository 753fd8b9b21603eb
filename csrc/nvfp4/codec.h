/* The interface of the NVFP4 kernels. They work on flat runs of blocks; shapes are handled by the caller.
 *
 * An encoding is defined by two things: the E4M3 code of each block (`block_code`), and the factor of each code (`step[code]`).
 * The rule for elements is always the same: e2m1(x / step), with a true division.
 */
#ifndef AQ_NVFP4_CODEC_H
#define AQ_NVFP4_CODEC_H

#include "formats.h"

#include <stdbool.h>

enum scale_choice { CHOICE_AMAX = 0, CHOICE_FOUR_OVER_SIX = 1, CHOICE_SWEEP = 2 };
enum encoding { ENCODING_MODELOPT = 0, ENCODING_STATIC = 1, ENCODING_CT = 2 };

#define MAX_GROUP 64
#define SCALE_CODES 128 /* number of positive E4M3 codes, including the NaN code 0x7F */

/* Position in `above` of the thresholds of index 1..7 and of the sign. The thresholds of the last step of the binary search
 * come first, so that their position is the upper bits of the index; then those of the second step, of the first, and the sign's. */
static const uint8_t ABOVE_SLOT[8] = {0, 4, 1, 6, 2, 5, 3, 7};

/* From here on in `above` of a 16-bit kind: the thresholds of index 4, 2, 6 and of the sign again, each twice in 32 bits. */
enum { ABOVE_PAIRS = 4 };

/* The table of a scale code for bytes: the bit patterns of bfloat16 from `bottom` on in windows of 64, of which each has at most one
 * threshold. With u = |bits| - bottom, or 0 if that is negative, and window = min(u / 64, 15), the element's code is base[window], and
 * one more if u % 64 > last_below[window]. */
struct code_windows {
    _Alignas(64) uint8_t base[16]; /* a cache line per code */
    int8_t last_below[16];
    uint16_t bottom[8]; /* eight times the same number */
};

struct pack_plan {
    int kind;  /* number_kind of the input */
    int group; /* columns per scale: 16, 32 or 64 */
    int choice;
    int encoding;
    float tensor_scale;  /* multiplier; for compressed-tensors the divisor */
    float largest_code;  /* 448, or 256 where 1.5 * amax must be representable */
    float tensor_amax;   /* only for the static encoding */
    const float *weight; /* importance, one per column, or NULL */
    size_t columns;      /* length of weight */
    float step[SCALE_CODES];
    /* Per code: the |bits| of the input's kind above which the index is at least 1..7, and above which a sign is stored, in the
     * order of ABOVE_SLOT. For 16-bit kinds they are uint16_t in the first half. Compare as signed numbers. */
    _Alignas(32) uint32_t above[SCALE_CODES][8];
    bool has_windows; /* windows is valid: bfloat16, the thresholds of all scale codes fit, and all but zeros have their sign stored */
    struct code_windows windows[SCALE_CODES];
};

/* Compute step, above and windows from the other fields. */
void plan_prepare(struct pack_plan *plan);

/* Return the E4M3 code of a block whose largest magnitude is `amax`. */
uint8_t block_code(const struct pack_plan *plan, float amax);

/* Return the code of a block with the least squared error. x: plan->group floats; weight: the same number, or NULL. */
uint8_t best_code(const struct pack_plan *plan, const float *x, const float *weight);

/* Comparison of candidate codes, added in any order. The code with the least exact error wins; of equal ones
 * that with the least error without weights, then the lower code. */
struct best_search {
    const struct pack_plan *plan;
    const float *x, *weight;
    double least;       /* negative before the first code */
    double least_plain; /* without weights */
    int code;
};
void best_search_try(struct best_search *search, int code);

struct unpack_plan {
    int kind; /* of the output */
    int group;
    bool divides; /* step = s / tensor_scale (compressed-tensors) instead of s * tensor_scale */
    float tensor_scale;
    float step[256]; /* by scale byte */
    /* For a 16-bit kind, by scale byte: the low bytes of the 16 codes' values, then the high bytes. */
    uint8_t value[256][32];
};

/* The value of an element code. NaN always has the same bits, because those of a product depend on the compiler. */
static inline float decoded(unsigned code, float step)
{
    const float v = (code & 8 ? -E2M1_VALUE[code & 7] : E2M1_VALUE[code & 7]) * step;
    return v == v ? v : bits_float(0x7fc00000u);
}

/* Compute step and value from the other fields. */
void unpack_prepare(struct unpack_plan *plan);

struct fake_plan {
    int kind;
    int group;
    float tensor_scale;
};

/* The kernels of one variant. pack returns the largest |bits| of the input, so that NaN and infinity are detected. */
struct codec_kernels {
    uint32_t (*amax)(const void *x, int kind, size_t count);
    uint32_t (*pack)(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes, uint8_t *scales);
    void (*unpack)(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out);
    void (*fake_quant)(const struct fake_plan *plan, const void *x, size_t blocks, void *out);
};

/* The serial variant. The others also call it for the blocks after the last whole register. */
uint32_t serial_amax(const void *x, int kind, size_t count);
uint32_t serial_pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes, uint8_t *scales);
void serial_unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out);
void serial_fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out);

static inline uint32_t magnitude_mask(int kind)
{
    return kind == KIND_F32 ? 0x7fffffffu : 0x7fffu;
}

/* The smallest |bits| of an infinite or NaN value of the kind. */
static inline uint32_t first_nonfinite(int kind)
{
    return kind == KIND_F32 ? 0x7f800000u : kind == KIND_F16 ? 0x7c00u : 0x7f80u;
}

#endif
