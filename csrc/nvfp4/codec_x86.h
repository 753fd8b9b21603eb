/* The NVFP4 kernels for x86-64 with AVX2 and F16C. One source, compiled by variant_avx2.c and variant_avx512.c with their own flags:
 * AVX-512's 32 registers and three-operand logic also help at this width; only the searches are 512 bits wide. The bytes equal those of the
 * serial reference.
 *
 * pack: maxima of eight runs of 16 at once, E4M3 rounding in vector code, and per element a binary search with four signed comparisons
 * of bit patterns with the thresholds of the block's scale code; for bfloat16 a look-up in two tables of 16 bytes instead. No division
 * (plan.c). unpack: two byte shuffles with the block's 16 values. Stores bypass the cache: nothing
 * reads the output soon, and reading the lines first would cost a third of the bandwidth.
 */
#ifndef AQ_NVFP4_CODEC_X86_H
#define AQ_NVFP4_CODEC_X86_H

#include "codec.h"
#include "sweep_lanes.h"

#include <immintrin.h>

typedef __m256i v256;

ALWAYS_INLINE v256 load(const void *p)
{
    return _mm256_loadu_si256(p);
}

ALWAYS_INLINE v256 broadcast(uint32_t v)
{
    return _mm256_set1_epi32((int)v);
}

static uint32_t largest_u32(v256 v)
{
    uint32_t lane[8], top = 0;
    _mm256_storeu_si256((v256 *)lane, v);
    for (int i = 0; i < 8; i++)
        top = lane[i] > top ? lane[i] : top;
    return top;
}

ALWAYS_INLINE v256 max_of(v256 a, v256 b, int kind)
{
    return kind == KIND_F32 ? _mm256_max_epi32(a, b) : _mm256_max_epi16(a, b);
}

ALWAYS_INLINE v256 magnitudes(v256 v, int kind)
{
    return _mm256_and_si256(v, kind == KIND_F32 ? broadcast(0x7fffffffu) : _mm256_set1_epi16(0x7fff));
}

/* A register of 32-bit maxima from one of 16-bit maxima. */
ALWAYS_INLINE v256 widest(v256 v, int kind)
{
    if (kind == KIND_F32)
        return v;
    return _mm256_and_si256(_mm256_max_epi16(v, _mm256_srli_epi32(v, 16)), broadcast(0xffffu));
}

static uint32_t amax_bits(const void *x, int kind, size_t count)
{
    const size_t size = kind_size(kind), per = 128 / size;
    const char *p = x;
    v256 top[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    size_t i = 0;
    for (; i + per <= count; i += per, p += 128) {
        _mm_prefetch(p + 4096, _MM_HINT_T0);
        _mm_prefetch(p + 4096 + 64, _MM_HINT_T0);
        for (int k = 0; k < 4; k++)
            top[k] = max_of(top[k], magnitudes(load(p + 32 * k), kind), kind);
    }
    v256 all = max_of(max_of(top[0], top[1], kind), max_of(top[2], top[3], kind), kind);
    uint32_t largest = largest_u32(widest(all, kind)), rest = serial_amax(p, kind, count - i);
    return rest > largest ? rest : largest;
}

/* ---- scales */

/* The scales of a few blocks first, then their elements: a block's elements wait for its scale, a long chain of dependent instructions,
 * and the processor reorders only a few hundred instructions. */
enum { AT_ONCE = 128 };
enum { GROUPS = 4 }; /* of eight blocks in one search */

/* Maxima of |bits| of eight blocks of 16, as 32-bit lanes in the order of the blocks. */
ALWAYS_INLINE v256 eight_maxima(const char *x, int kind)
{
    v256 m[8];
    if (kind == KIND_F32) {
        for (int b = 0; b < 8; b++)
            m[b] = _mm256_max_epi32(magnitudes(load(x + 64 * b), kind), magnitudes(load(x + 64 * b + 32), kind));
    } else {
        for (int b = 0; b < 8; b++)
            m[b] = magnitudes(load(x + 32 * b), kind);
    }
    for (int b = 0; b < 4; b++)
        m[b] = max_of(_mm256_unpacklo_epi64(m[2 * b], m[2 * b + 1]), _mm256_unpackhi_epi64(m[2 * b], m[2 * b + 1]), kind);
    for (int b = 0; b < 2; b++) {
        __m256 low = _mm256_castsi256_ps(m[2 * b]), high = _mm256_castsi256_ps(m[2 * b + 1]);
        m[b] =
            max_of(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd)), kind);
    }
    return widest(max_of(_mm256_permute2x128_si256(m[0], m[1], 0x20), _mm256_permute2x128_si256(m[0], m[1], 0x31), kind), kind);
}

ALWAYS_INLINE __m256 floats_of(v256 bits, int kind)
{
    if (kind == KIND_F32)
        return _mm256_castsi256_ps(bits);
    if (kind == KIND_BF16)
        return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    v256 halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0xd8);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
}

/* block_code of the ModelOpt encoding for eight maxima, as 32-bit lanes. */
ALWAYS_INLINE v256 eight_codes(__m256 amax, __m256 six)
{
    __m256 t = _mm256_div_ps(amax, six);
    t = _mm256_blendv_ps(t, _mm256_set1_ps(1.f), _mm256_cmp_ps(t, _mm256_setzero_ps(), _CMP_EQ_OQ));
    t = _mm256_max_ps(_mm256_set1_ps(0x1p-9f), _mm256_min_ps(_mm256_set1_ps(448.f), t)); /* NaN passes through */
    v256 u = _mm256_castps_si256(t);
    v256 even = _mm256_and_si256(_mm256_srli_epi32(u, 20), broadcast(1));
    v256 normal = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, broadcast(0x7ffffu - (120u << 23))), even), 20);
    v256 small = _mm256_castps_si256(_mm256_add_ps(t, _mm256_set1_ps(0x1p14f)));
    small = _mm256_sub_epi32(small, broadcast(0x46800000u));
    v256 code = _mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(broadcast(0x3c800000u), u));
    return _mm256_blendv_epi8(code, broadcast(0x7f), _mm256_castps_si256(_mm256_cmp_ps(t, t, _CMP_UNORD_Q)));
}

/* The lowest bytes of eight 32-bit lanes. */
ALWAYS_INLINE void store_bytes(uint8_t *to, v256 lanes)
{
    v256 four = _mm256_shuffle_epi8(lanes, _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1,
                                                            -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
    uint32_t low = (uint32_t)_mm256_extract_epi32(four, 0), high = (uint32_t)_mm256_extract_epi32(four, 4);
    memcpy(to, &low, 4);
    memcpy(to + 4, &high, 4);
}

ALWAYS_INLINE __m256 load_floats(const char *x, int kind)
{
    if (kind == KIND_F32)
        return _mm256_loadu_ps((const float *)(const void *)x);
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)x);
    if (kind == KIND_F16)
        return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* Transpose rows of eight floats. */
ALWAYS_INLINE void transpose(const __m256 r[8], f32v out[8])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 4; i++) {
        t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
        u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
        u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
        u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        out[i] = (f32v)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        out[i + 4] = (f32v)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* The same for 16 columns of bfloat16, magnitudes of rows `stride` bytes apart, converted to floats. */
ALWAYS_INLINE void transpose_bf16(const char *x, size_t stride, f32v out[16])
{
    const v256 zero = _mm256_setzero_si256();
    v256 row[8];
    for (size_t b = 0; b < 8; b++)
        row[b] = magnitudes(load(x + stride * b), KIND_BF16);
    for (int h = 0; h < 2; h++) {
        v256 p[4], pair[4], four[4];
        for (int b = 0; b < 4; b++) /* block b and b + 4, columns 8h .. 8h + 7 */
            p[b] = h ? _mm256_permute2x128_si256(row[b], row[b + 4], 0x31) : _mm256_permute2x128_si256(row[b], row[b + 4], 0x20);
        for (int b = 0; b < 2; b++) {
            pair[2 * b] = _mm256_unpacklo_epi16(p[2 * b], p[2 * b + 1]);
            pair[2 * b + 1] = _mm256_unpackhi_epi16(p[2 * b], p[2 * b + 1]);
        }
        for (int b = 0; b < 2; b++) {
            four[2 * b] = _mm256_unpacklo_epi32(pair[b], pair[b + 2]);
            four[2 * b + 1] = _mm256_unpackhi_epi32(pair[b], pair[b + 2]);
        }
        for (int i = 0; i < 4; i++) {
            out[8 * h + 2 * i] = (f32v)_mm256_unpacklo_epi16(zero, four[i]);
            out[8 * h + 2 * i + 1] = (f32v)_mm256_unpackhi_epi16(zero, four[i]);
        }
    }
}

/* The columns of eight blocks into the lanes of a search. */
ALWAYS_INLINE void load_eight(const struct pack_plan *plan, size_t group, const char *x, size_t first, struct batch *e)
{
    const size_t size = kind_size(plan->kind), stride = group * size;
    for (size_t i = 0; i < group; i += 8) {
        __m256 rows[8];
        if (plan->kind != KIND_BF16) {
            for (size_t b = 0; b < 8; b++)
                rows[b] = (__m256)((i32v)load_floats(x + b * stride + i * size, plan->kind) & all_lanes_i(0x7fffffff));
            transpose(rows, e->a + i);
        } else if (i % 16 == 0) {
            transpose_bf16(x + i * size, stride, e->a + i);
        }
        if (plan->weight) {
            for (size_t b = 0; b < 8; b++)
                rows[b] = _mm256_loadu_ps(plan->weight + (first + b) * group % plan->columns + i);
            transpose(rows, e->weight + i);
        }
    }
    i32v top[2] = {(i32v)e->a[0], (i32v)e->a[1]}; /* as integers, so that NaN is the largest */
    for (size_t i = 2; i < group; i++)
        top[i % 2] = most_of_i(top[i % 2], (i32v)e->a[i]);
    e->top = (f32v)most_of_i(top[0], top[1]);
}

/* Codes of blocks by search; a multiple of eight blocks, each code written for all `in_group` runs. Returns maxima of the magnitudes
 * as floats. Not inlined, like codes_by_rule, so that the loop of the common rule stays small. */
static __attribute__((noinline)) v256 searched(const struct pack_plan *plan, const char *x, size_t first, size_t blocks, size_t in_group,
                                               uint8_t *by_run)
{
    v256 top = _mm256_setzero_si256();
    const size_t bytes = (size_t)plan->group * kind_size(plan->kind);
    const struct sweep_plan s = sweep_plan_of(plan);
    struct batch e[GROUPS];
    for (size_t b = 0; b < blocks; b += 8 * GROUPS) {
        const size_t n = (blocks - b) / 8 < GROUPS ? (blocks - b) / 8 : GROUPS;
        for (size_t g = 0; g < n; g++)
            if (in_group == 1)
                load_eight(plan, 16, x + (b + 8 * g) * bytes, first + b + 8 * g, e + g);
            else
                load_eight(plan, 16 * in_group, x + (b + 8 * g) * bytes, first + b + 8 * g, e + g);
        search(&s, e, (int)n);
        for (size_t g = 0; g < n; g++, by_run += 8 * in_group) {
            top = _mm256_max_epi32(top, (v256)e[g].top);
            if (in_group == 1)
                store_bytes(by_run, (v256)e[g].best);
            for (size_t i = 0; in_group > 1 && i < 8 * in_group; i++)
                by_run[i] = (uint8_t)e[g].best[i / in_group];
        }
    }
    return top;
}

/* Codes of eight largest magnitudes, by the rules that need no search. */
static __attribute__((noinline)) void codes_by_rule(const struct pack_plan *plan, v256 bits, uint8_t *to)
{
    const f32v top = (f32v)floats_of(bits, plan->kind);
    for (int b = 0; b < 8; b++)
        to[b] = block_code(plan, top[b]);
}

/* ---- elements */

/* base | (mask & bits) */
ALWAYS_INLINE v256 with_bits(v256 base, v256 mask, v256 bits)
{
#ifdef __AVX512VL__
    return _mm256_ternarylogic_epi32(base, mask, bits, 0xf8);
#else
    return _mm256_or_si256(base, _mm256_and_si256(mask, bits));
#endif
}

/* mask ? yes : no */
ALWAYS_INLINE v256 select_bits(v256 mask, v256 yes, v256 no)
{
#ifdef __AVX512VL__
    return _mm256_ternarylogic_epi32(mask, yes, no, 0xca);
#else
    return _mm256_blendv_epi8(no, yes, mask);
#endif
}

/* Codes of 16 elements as 16-bit lanes, by binary search. A pair of thresholds is broadcast by its load; only the last step, of four
 * thresholds, needs a shuffle. */
ALWAYS_INLINE v256 sixteen_codes_16(v256 v, const uint32_t *above)
{
    const uint32_t *pair = above + ABOVE_PAIRS;
    const v256 table = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)(const void *)above));
    const v256 a = _mm256_and_si256(v, _mm256_set1_epi16(0x7fff));
    v256 half = _mm256_cmpgt_epi16(a, broadcast(pair[0]));
    v256 quarter = _mm256_cmpgt_epi16(a, select_bits(half, broadcast(pair[2]), broadcast(pair[1])));
    v256 index = with_bits(_mm256_set1_epi16(0x0100), half, _mm256_set1_epi16(0x0404));
    index = with_bits(index, quarter, _mm256_set1_epi16(0x0202));
    v256 last = _mm256_cmpgt_epi16(a, _mm256_shuffle_epi8(table, index));
    /* With its sign bit flipped, a negative number compares like its magnitude and a positive one as less than all. */
    v256 sign = _mm256_cmpgt_epi16(_mm256_xor_si256(v, _mm256_set1_epi16((short)0x8000)), broadcast(pair[3]));
    v256 code = with_bits(_mm256_and_si256(index, _mm256_set1_epi16(7)), last, _mm256_set1_epi16(1));
    return with_bits(code, sign, _mm256_set1_epi16(8));
}

ALWAYS_INLINE v256 eight_codes_32(v256 v, const uint32_t *above)
{
    const v256 table = _mm256_load_si256((const v256 *)(const void *)above), a = _mm256_and_si256(v, broadcast(0x7fffffffu));
    v256 half = _mm256_cmpgt_epi32(a, _mm256_permutevar8x32_epi32(table, broadcast(6)));
    v256 quarter = _mm256_sub_epi32(broadcast(4), half);
    quarter = _mm256_cmpgt_epi32(a, _mm256_permutevar8x32_epi32(table, quarter));
    v256 index = _mm256_and_si256(half, broadcast(2));
    index = _mm256_sub_epi32(index, quarter);
    v256 last = _mm256_cmpgt_epi32(a, _mm256_permutevar8x32_epi32(table, index));
    v256 sign = _mm256_xor_si256(v, broadcast(0x80000000u));
    sign = _mm256_cmpgt_epi32(sign, _mm256_permutevar8x32_epi32(table, broadcast(7)));
    v256 code = _mm256_sub_epi32(_mm256_add_epi32(index, index), last);
    return _mm256_or_si256(code, _mm256_and_si256(sign, broadcast(8)));
}

ALWAYS_INLINE v256 sixteen_codes(const char *x, int kind, const uint32_t *above)
{
    if (kind != KIND_F32)
        return sixteen_codes_16(load(x), above);
    v256 codes = _mm256_packs_epi32(eight_codes_32(load(x), above), eight_codes_32(load(x + 32), above));
    return _mm256_permute4x64_epi64(codes, 0xd8);
}

ALWAYS_INLINE v256 two_halves(const void *low, const void *high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(low)), _mm_loadu_si128(high), 1);
}

/* Codes of two blocks of finite bfloat16 as bytes, by the table of windows: twice as many elements in a register as with words. */
ALWAYS_INLINE v256 two_blocks_windows(const char *x, const struct code_windows *a, const struct code_windows *b)
{
    const v256 words[2] = {two_halves(x, x + 32), two_halves(x + 16, x + 48)}, bottom = two_halves(a->bottom, b->bottom);
    v256 u[2], not_zero[2];
    for (int i = 0; i < 2; i++) {
        u[i] = _mm256_subs_epu16(magnitudes(words[i], KIND_BF16), bottom);
        not_zero[i] = _mm256_subs_epu16(words[i], _mm256_set1_epi16(1)); /* -0.0 loses its sign */
    }
    v256 window = _mm256_packus_epi16(_mm256_srli_epi16(u[0], 6), _mm256_srli_epi16(u[1], 6));
    window = _mm256_min_epu8(window, _mm256_set1_epi8(15));
    const v256 low = _mm256_set1_epi16(63), in_window = _mm256_packus_epi16(_mm256_and_si256(u[0], low), _mm256_and_si256(u[1], low));
    const v256 above = _mm256_cmpgt_epi8(in_window, _mm256_shuffle_epi8(two_halves(a->last_below, b->last_below), window));
    const v256 code = _mm256_sub_epi8(_mm256_shuffle_epi8(two_halves(a->base, b->base), window), above);
    const v256 negative = _mm256_packs_epi16(not_zero[0], not_zero[1]); /* keeps the sign bits */
    return _mm256_blendv_epi8(code, _mm256_or_si256(code, _mm256_set1_epi8(8)), negative);
}

ALWAYS_INLINE v256 four_blocks_windows(const char *x, const struct pack_plan *plan, const uint8_t *scales)
{
    const v256 shift_odd = _mm256_set1_epi16(0x1001); /* even + 16 * odd */
    const v256 a = two_blocks_windows(x, plan->windows + scales[0], plan->windows + scales[1]);
    const v256 b = two_blocks_windows(x + 64, plan->windows + scales[2], plan->windows + scales[3]);
    return _mm256_permute4x64_epi64(_mm256_packus_epi16(_mm256_maddubs_epi16(a, shift_odd), _mm256_maddubs_epi16(b, shift_odd)), 0xd8);
}

ALWAYS_INLINE v256 four_blocks(const char *x, int kind, const struct pack_plan *plan, const uint8_t *scales)
{
    const size_t bytes = 16 * kind_size(kind);
    v256 two[2];
    for (size_t i = 0; i < 2; i++, x += 2 * bytes, scales += 2) {
        const v256 a = sixteen_codes(x, kind, plan->above[scales[0]]), b = sixteen_codes(x + bytes, kind, plan->above[scales[1]]);
        two[i] = _mm256_maddubs_epi16(_mm256_packus_epi16(a, b), _mm256_set1_epi16(0x1001)); /* even + 16 * odd */
    }
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(two[0], two[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

ALWAYS_INLINE void store_codes(uint8_t *to, v256 v, bool streams)
{
    if (streams)
        _mm256_stream_si256((v256 *)to, v);
    else
        _mm256_storeu_si256((v256 *)to, v);
}

/* Each lane gets the largest of its group: of two adjacent lanes if a group has two runs of 16, of four if it has four. */
ALWAYS_INLINE v256 group_maxima(v256 bits, size_t in_group)
{
    if (in_group >= 2)
        bits = _mm256_max_epi32(bits, _mm256_shuffle_epi32(bits, 0xb1));
    if (in_group == 4)
        bits = _mm256_max_epi32(bits, _mm256_shuffle_epi32(bits, 0x4e));
    return bits;
}

/* The largest |bits| of the group of each of eight runs of 16. */
ALWAYS_INLINE v256 next_maxima(const char *x, int kind, size_t in_group)
{
    for (size_t ahead = 0; ahead < 8 * 16 * kind_size(kind); ahead += 64)
        _mm_prefetch(x + 4096 + ahead, _MM_HINT_T0);
    return group_maxima(eight_maxima(x, kind), in_group);
}

/* `runs` runs of 16 columns, a multiple of eight. Every run gets a scale code, the same one in a group. */
ALWAYS_INLINE uint32_t pack_runs(const struct pack_plan *plan, int kind, size_t in_group, const char *x, size_t first, size_t runs,
                                 uint8_t *codes, uint8_t *scales)
{
    const bool plain = plan->encoding == ENCODING_MODELOPT && plan->choice == CHOICE_AMAX;
    const __m256 six = _mm256_set1_ps(6.f * plan->tensor_scale);
    const size_t bytes = 16 * kind_size(kind);
    const bool streams = (uintptr_t)codes % 32 == 0;
    v256 top = _mm256_setzero_si256();
    uint8_t apart[AT_ONCE];
    for (size_t from = 0; from < runs; from += AT_ONCE) {
        const size_t to = runs - from < AT_ONCE ? runs : from + AT_ONCE;
        uint8_t *own = in_group == 1 ? scales + from : apart; /* by run, starting at `from` */
        for (size_t b = from; plain && b < to; b += 8) {
            const v256 bits = next_maxima(x + b * bytes, kind, in_group);
            top = _mm256_max_epi32(top, bits);
            store_bytes(own + (b - from), eight_codes(floats_of(bits, kind), six));
        }
        /* Separate, because a call would move the constants out of the registers. A search finds the maxima itself, as floats. */
        for (size_t b = from; (plan->choice == CHOICE_AMAX || kind == KIND_F16) && !plain && b < to; b += 8) {
            const v256 bits = next_maxima(x + b * bytes, kind, in_group);
            top = _mm256_max_epi32(top, bits);
            if (plan->choice == CHOICE_AMAX)
                codes_by_rule(plan, bits, own + (b - from));
        }
        if (plan->choice != CHOICE_AMAX) {
            const v256 floats = searched(plan, x + from * bytes, first + from / in_group, (to - from) / in_group, in_group, own);
            if (kind != KIND_F16)
                top = _mm256_max_epi32(top, kind == KIND_BF16 ? _mm256_srli_epi32(floats, 16) : floats);
        }
        const bool finite = kind == KIND_BF16 && !any_lane((i32v)top >= (int)first_nonfinite(kind));
        if (finite && plan->has_windows)
            for (size_t b = from; b < to; b += 4)
                store_codes(codes + 8 * b, four_blocks_windows(x + b * bytes, plan, own + (b - from)), streams);
        else
            for (size_t b = from; b < to; b += 4)
                store_codes(codes + 8 * b, four_blocks(x + b * bytes, kind, plan, own + (b - from)), streams);
        for (size_t b = from; in_group > 1 && b < to; b += in_group)
            scales[b / in_group] = own[b - from];
    }
    _mm_sfence();
    return largest_u32(top);
}

ALWAYS_INLINE uint32_t pack_kind(const struct pack_plan *plan, int kind, const char *x, size_t first, size_t runs, uint8_t *codes,
                                 uint8_t *scales)
{
    if (plan->group == 16) /* without the loops for other groups */
        return pack_runs(plan, kind, 1, x, first, runs, codes, scales);
    return pack_runs(plan, kind, (size_t)plan->group / 16, x, first, runs, codes, scales);
}

static uint32_t pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    const size_t in_group = (size_t)plan->group / 16, unit = plan->choice == CHOICE_AMAX ? 8 / in_group : 8; /* blocks */
    const size_t whole = blocks / unit * unit;
    const size_t done = whole * (size_t)plan->group, runs = whole * in_group;
    uint32_t top = 0;
    switch (plan->kind) {
    case KIND_F32:
        top = pack_kind(plan, KIND_F32, x, first, runs, codes, scales);
        break;
    case KIND_F16:
        top = pack_kind(plan, KIND_F16, x, first, runs, codes, scales);
        break;
    default:
        top = pack_kind(plan, KIND_BF16, x, first, runs, codes, scales);
    }
    uint32_t rest =
        serial_pack(plan, (const char *)x + done * kind_size(plan->kind), first + whole, blocks - whole, codes + done / 2, scales + whole);
    return rest > top ? rest : top;
}

/* ---- unpack */

/* The 16 nibbles of each 8 bytes, in order, one block per lane. */
ALWAYS_INLINE v256 nibbles(const uint8_t *codes)
{
    __m128i c = _mm_loadu_si128((const __m128i *)codes), mask = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(c, mask), odd = _mm_and_si128(_mm_srli_epi16(c, 4), mask);
    return _mm256_set_m128i(_mm_unpackhi_epi8(even, odd), _mm_unpacklo_epi8(even, odd));
}

ALWAYS_INLINE v256 pair(const uint8_t *low, const uint8_t *high)
{
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)low)), _mm_loadu_si128((const __m128i *)high),
                                   1);
}

/* By runs of 16 columns, an even number of them; a group has 1 << shift runs. */
static void unpack_halves(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t runs, int shift,
                          uint16_t *out)
{
    const bool streams = (uintptr_t)out % 32 == 0;
    for (size_t b = 0; b < runs; b += 2) {
        _mm_prefetch((const char *)codes + 8 * b + 2048, _MM_HINT_T0);
        const uint8_t *first = plan->value[scales[b >> shift]], *second = plan->value[scales[(b + 1) >> shift]];
        v256 index = nibbles(codes + 8 * b);
        v256 low = _mm256_shuffle_epi8(pair(first, second), index);
        v256 high = _mm256_shuffle_epi8(pair(first + 16, second + 16), index);
        v256 front = _mm256_unpacklo_epi8(low, high), back = _mm256_unpackhi_epi8(low, high);
        store_codes((uint8_t *)(out + 16 * b), _mm256_permute2x128_si256(front, back, 0x20), streams);
        store_codes((uint8_t *)(out + 16 * b + 16), _mm256_permute2x128_si256(front, back, 0x31), streams);
    }
    _mm_sfence();
}

static void unpack_floats(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t runs, int shift, float *out)
{
    const bool streams = (uintptr_t)out % 32 == 0;
    const __m256 values = _mm256_loadu_ps(E2M1_VALUE), nan = _mm256_set1_ps(bits_float(0x7fc00000u));
    for (size_t b = 0; b < runs; b++) {
        __m128i c = _mm_loadl_epi64((const __m128i *)(codes + 8 * b)), mask = _mm_set1_epi8(15);
        __m128i each = _mm_unpacklo_epi8(_mm_and_si128(c, mask), _mm_and_si128(_mm_srli_epi16(c, 4), mask));
        __m256 step = _mm256_set1_ps(plan->step[scales[b >> shift]]);
        for (int half = 0; half < 2; half++) {
            v256 index = _mm256_cvtepu8_epi32(half ? _mm_srli_si128(each, 8) : each);
            v256 sign = _mm256_slli_epi32(_mm256_srli_epi32(index, 3), 31);
            __m256 v = _mm256_xor_ps(_mm256_permutevar8x32_ps(values, index), _mm256_castsi256_ps(sign));
            v = _mm256_mul_ps(v, step);
            v = _mm256_blendv_ps(v, nan, _mm256_cmp_ps(v, v, _CMP_UNORD_Q)); /* 0 * inf is a NaN with a sign */
            if (streams)
                _mm256_stream_ps(out + 16 * b + 8 * half, v);
            else
                _mm256_storeu_ps(out + 16 * b + 8 * half, v);
        }
    }
    _mm_sfence();
}

static void unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out)
{
    const int shift = plan->group == 16 ? 0 : plan->group == 32 ? 1 : 2;
    const size_t whole = shift ? blocks : blocks / 2 * 2, done = whole * (size_t)plan->group;
    if (plan->kind == KIND_F32)
        unpack_floats(plan, codes, scales, whole << shift, shift, out);
    else
        unpack_halves(plan, codes, scales, whole << shift, shift, out);
    serial_unpack(plan, codes + done / 2, scales + whole, blocks - whole, (char *)out + done * kind_size(plan->kind));
}

#include "fake_quant_x86.h"

#endif
