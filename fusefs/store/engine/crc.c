/* See crc.h. Eight tables take eight bytes a step (2 GB/s). Where the processor multiplies without
 * carry, 64 bytes are folded a step (10 GB/s and more; Gopal and others, "Fast CRC Computation for
 * Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009), and the tables take what remains. */

#include "crc.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Reflected: the coefficient of x^0 is the highest bit. The last is of the catalogue of
 * parametrised CRC algorithms, CRC-64/NVME. */
static const struct {
    uint64_t polynomial;
    int width;
} KINDS[CRC_KINDS] = {
    {0xedb88320, 32},
    {0x82f63b78, 32},
    {0x9a6c9329ac4bc9b5, 64},
};

static uint64_t tables[CRC_KINDS][8][256];
static uint64_t folding[CRC_KINDS][2][2]; /* by 64 and by 16 bytes: of the low and the high half */

static uint64_t with_tables(uint64_t table[8][256], uint64_t crc, const uint8_t *at, size_t size) {
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t x;
        memcpy(&x, at, 8);
        x ^= crc;
        crc = table[7][x & 255] ^ table[6][x >> 8 & 255] ^ table[5][x >> 16 & 255] ^
              table[4][x >> 24 & 255] ^ table[3][x >> 32 & 255] ^ table[2][x >> 40 & 255] ^
              table[1][x >> 48 & 255] ^ table[0][x >> 56];
    }
    for (; size; at++, size--)
        crc = table[0][(crc ^ *at) & 255] ^ crc >> 8;
    return crc;
}

#if defined(__x86_64__)
#define FOLDS __attribute__((target("pclmul,sse2")))

FOLDS static inline __m128i folded(__m128i block, __m128i by, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(block, by, 0x00);
    __m128i high = _mm_clmulepi64_si128(block, by, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

FOLDS static uint64_t with_folding(enum crc_kind kind, uint64_t crc, const uint8_t *at, size_t size) {
    const __m128i *from = (const __m128i *)at;
    __m128i by = _mm_loadu_si128((const __m128i *)folding[kind][0]), lanes[4];
    for (int i = 0; i < 4; i++)
        lanes[i] = _mm_loadu_si128(from++);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_set_epi64x(0, (long long)crc));
    for (size -= 64; size >= 64; size -= 64)
        for (int i = 0; i < 4; i++)
            lanes[i] = folded(lanes[i], by, _mm_loadu_si128(from++));
    by = _mm_loadu_si128((const __m128i *)folding[kind][1]);
    for (int i = 1; i < 4; i++)
        lanes[0] = folded(lanes[0], by, lanes[i]);
    uint8_t rest[16];
    _mm_storeu_si128((__m128i *)rest, lanes[0]);
    crc = with_tables(tables[kind], 0, rest, sizeof rest);
    return with_tables(tables[kind], crc, (const uint8_t *)from, size);
}
#endif

uint64_t crc_of(enum crc_kind kind, uint64_t crc, const void *data, size_t size) {
    uint64_t ones = ~0ULL >> (64 - KINDS[kind].width);
    crc ^= ones;
#if defined(__x86_64__)
    if (size >= 128 && __builtin_cpu_supports("pclmul"))
        return with_folding(kind, crc, data, size) ^ ones;
#endif
    return with_tables(tables[kind], crc, data, size) ^ ones;
}

/* x^n modulo the polynomial, reflected in 64 bits. */
static uint64_t power(enum crc_kind kind, int n) {
    uint64_t value = 1ULL << (KINDS[kind].width - 1);
    for (; n; n--)
        value = value >> 1 ^ (value & 1 ? KINDS[kind].polynomial : 0);
    return value << (64 - KINDS[kind].width);
}

void crc_prepare(void) {
    for (int kind = 0; kind < CRC_KINDS; kind++) {
        for (int byte = 0; byte < 256; byte++) {
            uint64_t value = byte;
            for (int bit = 0; bit < 8; bit++)
                value = value >> 1 ^ (value & 1 ? KINDS[kind].polynomial : 0);
            tables[kind][0][byte] = value;
        }
        for (int step = 1; step < 8; step++)
            for (int byte = 0; byte < 256; byte++) {
                uint64_t before = tables[kind][step - 1][byte];
                tables[kind][step][byte] = tables[kind][0][before & 255] ^ before >> 8;
            }
        /* The product of two reflected numbers of 64 bits lacks one bit, hence n - 1. */
        for (int far = 0; far < 2; far++) {
            int bits = far ? 128 : 512;
            folding[kind][far][0] = power(kind, bits + 64 - 1);
            folding[kind][far][1] = power(kind, bits - 1);
        }
    }
}
