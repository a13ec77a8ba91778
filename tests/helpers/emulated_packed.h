// The machine of csrc/packed for a CPU, on top of cuda_emulator.h and emulated_matrix.h.
#pragma once

static Quad load_once(const char* p, unsigned long long) { return *(const Quad*)p; }
static unsigned load_byte(const char* p) { return *(const unsigned char*)p; }
static unsigned load_short(const char* p) { return *(const unsigned short*)p; }
static void copy_word_async(char* shared, const char* global) { memcpy(shared, global, 4); }
static float load_constant(const float* p) { return *p; }
static Quad load_constant(const char* p) { return *(const Quad*)p; }
static unsigned choose_bytes(unsigned a, unsigned b, unsigned selector) {
    unsigned long long both = a | (unsigned long long)b << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        int which = selector >> 4 * i & 15;
        if (which > 7) emulator::fail("a selector of bytes has %d", which);
        result |= (unsigned)(both >> 8 * which & 255) << 8 * i;
    }
    return result;
}
static float float_of_half(unsigned bits) { return (float)emulator::from_bits<_Float16>(bits & 0xffff); }
static unsigned halves_of(float first, float second) {
    return (unsigned)(emulator::to_bits((_Float16)first) | emulator::to_bits((_Float16)second) << 16);
}
static unsigned bfloats_of(float first, float second) {
    unsigned bits[2];
    float values[2] = {first, second};
    for (int i = 0; i < 2; i++) {
        memcpy(&bits[i], &values[i], 4);
        bits[i] = (bits[i] + 0x7fff + (bits[i] >> 16 & 1)) >> 16;
    }
    return bits[0] | bits[1] << 16;
}
static float float_of_e4m3(unsigned byte) {
    int exponent = byte >> 3 & 15, mantissa = byte & 7;
    float magnitude = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
    return byte & 128 ? -magnitude : magnitude;
}
static unsigned halves_of_e4m3(unsigned bytes) {
    return halves_of(float_of_e4m3(bytes & 255), float_of_e4m3(bytes >> 8 & 255));
}
static void halves_of_e4m3(unsigned bytes, unsigned& low, unsigned& high) {
    low = halves_of_e4m3(bytes), high = halves_of_e4m3(bytes >> 16);
}
static float nearest_e4m3(float x) {
    float magnitude = fminf(fabsf(x), 448.0f);
    int exponent = magnitude ? ilogbf(magnitude) : -6;
    float step = ldexpf(1.0f, (exponent < -6 ? -6 : exponent) - 3);
    return copysignf(fminf(rintf(magnitude / step) * step, 448.0f), x);
}
static unsigned rounded_to_e4m3(float first, float second) { return halves_of(nearest_e4m3(first), nearest_e4m3(second)); }
static unsigned subtract_halves(unsigned a, unsigned b) {
    return halves_of(float_of_half(a) - float_of_half(b), float_of_half(a >> 16) - float_of_half(b >> 16));
}
static float low(unsigned pair) { return emulator::widen((unsigned short)pair); }
static float high(unsigned pair) { return emulator::widen((unsigned short)(pair >> 16)); }
static unsigned multiply_pairs(unsigned a, unsigned b) { return pack(low(a) * low(b), high(a) * high(b)); }
static unsigned multiply_add_pairs(unsigned a, unsigned b, unsigned c) {
    return pack(low(a) * low(b) + low(c), high(a) * high(b) + high(c));
}
static unsigned subtract_pairs(unsigned a, unsigned b) { return pack(low(a) - low(b), high(a) - high(b)); }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static float __fdiv_rn(float a, float b) { return a / b; }
