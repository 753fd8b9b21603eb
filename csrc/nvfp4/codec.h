/* What the NVFP4 kernels take and give. Kernels know flat runs of blocks; shapes are the caller's affair.
 *
 * Every encoding comes down to two things: which E4M3 code a block gets (`block_code`), and what each code multiplies
 * by (`step[code]`). The element rule is the same for all: e2m1(x / step), a true divide.
 */
#ifndef AQ_NVFP4_CODEC_H
#define AQ_NVFP4_CODEC_H

#include "formats.h"

#include <stdbool.h>

enum scale_choice { CHOICE_AMAX = 0, CHOICE_FOUR_OVER_SIX = 1, CHOICE_SWEEP = 2 };
enum encoding { ENCODING_MODELOPT = 0, ENCODING_STATIC = 1, ENCODING_CT = 2 };

#define MAX_GROUP 64
#define SCALE_CODES 128 /* positive E4M3 codes, the NaN code 0x7F among them */

/* Where `above` keeps the threshold of index 1..7 and of the sign: those of the last step of a search by halves come first,
 * so that the place of one is the upper bits of the index; then those of the second step, of the first, and the sign's. */
static const uint8_t ABOVE_SLOT[8] = {0, 4, 1, 6, 2, 5, 3, 7};

/* From here on in `above` of a 16-bit kind, those of index 4, 2, 6 and of the sign again, each twice in 32 bits. */
enum { ABOVE_PAIRS = 4 };

/* The thresholds of a scale code once more, for bfloat16: with |bits| held to low .. high, the element's code is the upper four
 * bits of |bits| + add[|bits| / 32 % 32]. Such a run of 32 patterns, a quarter of an octave, holds one threshold at most. */
enum { STAIRS = 32 };

struct pack_plan {
    int kind;  /* number_kind of the input */
    int group; /* columns of one scale: 16, 32 or 64 */
    int choice;
    int encoding;
    float tensor_scale;  /* multiplier; for compressed-tensors the divisor */
    float largest_code;  /* F: 448, or 256 where 1.5 * amax must stay encodable */
    float tensor_amax;   /* static encoding alone */
    const float *weight; /* one a column (importance), or NULL */
    size_t columns;      /* length of weight */
    float step[SCALE_CODES];
    /* Per code: |bits| of the input's kind above which the index is 1..7 or more, and above which a sign is kept, in the
     * order of ABOVE_SLOT. 16-bit kinds have theirs as uint16_t in the first half. Compare as signed numbers. */
    _Alignas(32) uint32_t above[SCALE_CODES][8];
    bool stepped; /* stairs holds: bfloat16, and no scale code's thresholds lie too close or too high for it */
    struct stairs {
        _Alignas(32) uint16_t add[STAIRS];
        uint32_t low, high, sign; /* each twice 16 bits */
    } stairs[SCALE_CODES];
};

/* Fills step and above from the rest. */
void plan_prepare(struct pack_plan *plan);

/* The E4M3 code of a block whose largest magnitude is `amax`. */
uint8_t block_code(const struct pack_plan *plan, float amax);

/* The code for one block by least squared error; x holds plan->group floats, weight as many or NULL. */
uint8_t best_code(const struct pack_plan *plan, const float *x, const float *weight);

/* Codes that enter one by one, in any order; the one of least exact error holds, the lower code where two are equal. */
struct contest {
    const struct pack_plan *plan;
    const float *x, *weight;
    double least; /* negative before the first */
    int code;
};
void contest_enter(struct contest *contest, int code);

struct unpack_plan {
    int kind; /* of the output */
    int group;
    bool divides; /* step = s / tensor_scale (compressed-tensors) in place of s * tensor_scale */
    float tensor_scale;
    float step[256]; /* by scale byte */
    /* Of a 16-bit kind, by scale byte: the low bytes of the 16 codes' values, then the high bytes. */
    uint8_t value[256][32];
};

/* What an element code becomes. A NaN always has the same bits: those of a product depend on how the compiler writes it. */
static inline float decoded(unsigned code, float step)
{
    const float v = (code & 8 ? -E2M1_VALUE[code & 7] : E2M1_VALUE[code & 7]) * step;
    return v == v ? v : bits_float(0x7fc00000u);
}

/* Fills step and value from the rest. */
void unpack_prepare(struct unpack_plan *plan);

struct fake_plan {
    int kind;
    int group;
    float tensor_scale;
};

/* One variant's kernels. pack returns the largest |bits| seen, so that a NaN or inf never passes unseen. */
struct codec_kernels {
    const char *name;
    uint32_t (*amax)(const void *x, int kind, size_t count);
    uint32_t (*pack)(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes,
                     uint8_t *scales);
    void (*unpack)(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks,
                   void *out);
    void (*fake_quant)(const struct fake_plan *plan, const void *x, size_t blocks, void *out);
};

extern const struct codec_kernels codec_serial;
#if defined(__x86_64__)
extern const struct codec_kernels codec_avx2, codec_avx512;
#elif defined(__aarch64__)
extern const struct codec_kernels codec_neon;
#endif

static inline uint32_t magnitude_mask(int kind)
{
    return kind == KIND_F32 ? 0x7fffffffu : 0x7fffu;
}

/* |bits| from which a value of the kind is infinite or NaN. */
static inline uint32_t first_nonfinite(int kind)
{
    return kind == KIND_F32 ? 0x7f800000u : kind == KIND_F16 ? 0x7c00u : 0x7f80u;
}

#endif
