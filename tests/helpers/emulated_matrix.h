// The machine of csrc/attention/device.cuh for a CPU, on top of cuda_emulator.h. An asynchronous copy
// fills its target with NaN at once and with the values only when it is waited for, so that a missing
// wait, or a buffer filled again too early, shows in the result. Copies from forbidden places before
// a thread has waited for earlier kernels end the run. Blocks must run in ascending order: a block that
// looks for what a later one writes ends the run too.
#pragma once
#include <math.h>

#define NEGATIVE_INFINITY (-INFINITY)
#define METHOD inline

struct Quad;
struct Float4;

namespace emulator {

struct Copy {
    char* target;
    const char* source;
    int bytes, group;
};
static Copy copies[kMaxThreads][256];
static int num_copies[kMaxThreads], num_groups[kMaxThreads];

// What the kernel before this one writes: no thread may copy it before it has waited.
struct Range {
    const char *begin, *end;
};
static const Range* forbidden;
static int num_forbidden;
static unsigned waited_in[kMaxThreads];  // block + 1 in which a thread last waited
static int num_early;  // copies by threads that had not waited

static float widen(unsigned short bits) {
#if HALF
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
#else
    unsigned wide = (unsigned)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
#endif
}
static unsigned short narrow(float value) {
#if HALF
    _Float16 half = (_Float16)value;
    unsigned short bits;
    memcpy(&bits, &half, 2);
    return bits;
#else
    unsigned wide;
    memcpy(&wide, &value, 4);
    return (unsigned short)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
#endif
}
// Value `column` of row `row` of a matrix whose words the lanes hold.
static float element(const unsigned* words, int row, int column) {
    return widen((unsigned short)(words[row * 4 + column / 2] >> (column % 2 * 16)));
}

}  // namespace emulator

static void copy_async(char* shared, const char* global, int bytes) {
    int thread = threadIdx.x, i = emulator::num_copies[thread]++;
    if (i >= 256) emulator::fail("thread %d has too many copies on their way", thread);
    bool is_early = bytes > 0 && emulator::waited_in[thread] != blockIdx.x + 1;
    emulator::num_early += is_early;
    for (int r = 0; is_early && r < emulator::num_forbidden; r++)
        if (global < emulator::forbidden[r].end && global + bytes > emulator::forbidden[r].begin)
            emulator::fail("thread %d copies what an earlier kernel still writes", thread);
    memset(shared, 0xff, 16);
    emulator::copies[thread][i] = {shared, global, bytes, emulator::num_groups[thread]};
}
static unsigned long long cache_policy(bool) { return 0; }
static void copy_async(char* shared, const char* global, int bytes, unsigned long long) {
    copy_async(shared, global, bytes);
}
static void commit_copies() { emulator::num_groups[threadIdx.x]++; }
template <int N> static void wait_copies() {
    int thread = threadIdx.x, kept = 0;
    for (int i = 0; i < emulator::num_copies[thread]; i++) {
        emulator::Copy copy = emulator::copies[thread][i];
        if (copy.group >= emulator::num_groups[thread] - N) {
            emulator::copies[thread][kept++] = copy;
            continue;
        }
        memset(copy.target, 0, 16);
        memcpy(copy.target, copy.source, copy.bytes);
    }
    emulator::num_copies[thread] = kept;
}

struct Quad {
    unsigned x[4];
};
struct __align__(16) Float4 {
    float x[4];
};

static Quad load_rows(const char* row, bool is_transposed) {
    const unsigned long long* addresses = emulator::sync_warp(__LINE__, 0xffffffffu, (unsigned long long)row);
    Quad m;
    int lane = emulator::lane();
    for (int i = 0; i < 4; i++) {
        unsigned short values[2];
        for (int j = 0; j < 2; j++) {
            int r = lane / 4, c = lane % 4 * 2 + j;
            if (is_transposed) { int kept = r; r = c, c = kept; }
            memcpy(&values[j], (const char*)addresses[i * 8 + r] + c * 2, 2);
        }
        m.x[i] = values[0] | (unsigned)values[1] << 16;
    }
    emulator::sync_warp(__LINE__, 0xffffffffu, 0);  // nobody writes before all have read
    return m;
}
static Quad load_matrices(const char* row) { return load_rows(row, false); }
static Quad load_matrices_transposed(const char* row) { return load_rows(row, true); }

static unsigned transpose_matrix(unsigned values) {
    const unsigned long long* words = emulator::sync_warp(__LINE__, 0xffffffffu, values);
    unsigned result = 0;
    for (int j = 0; j < 2; j++) {
        int r = emulator::lane() % 4 * 2 + j, c = emulator::lane() / 4;
        unsigned word = (unsigned)words[r * 4 + c / 2];
        result |= (word >> (c % 2 * 16) & 0xffff) << (j * 16);
    }
    return result;
}

static void multiply(float (&c)[4], const Quad& a, unsigned b0, unsigned b1) {
    unsigned words[6][32];
    for (int i = 0; i < 3; i++) {
        unsigned low = i < 2 ? a.x[i * 2] : b0, high = i < 2 ? a.x[i * 2 + 1] : b1;
        unsigned long long both = low | (unsigned long long)high << 32;
        const unsigned long long* values = emulator::sync_warp(__LINE__, 0xffffffffu, both);
        for (int l = 0; l < 32; l++) words[i * 2][l] = (unsigned)values[l], words[i * 2 + 1][l] = (unsigned)(values[l] >> 32);
    }
    int lane = emulator::lane();
    for (int i = 0; i < 4; i++) {
        int row = lane / 4, column = lane % 4 * 2 + i % 2, lower = i / 2;
        double sum = c[i];
        for (int k = 0; k < 16; k++)  // a's matrices: rows 0-7, rows 8-15, then the second half of k
            sum += (double)emulator::element(words[k / 8 * 2 + lower], row, k % 8) *
                   emulator::element(words[4 + k / 8], column, k % 8);
        c[i] = (float)sum;
    }
}
static unsigned pack(float first, float second) {
    return emulator::narrow(first) | (unsigned)emulator::narrow(second) << 16;
}
#if QUANTIZED
static unsigned nearest_byte(float x) {
    if (!(fabsf(x) <= 448.0f)) x = copysignf(448.0f, x);
    unsigned sign = std::signbit(x) ? 128 : 0;
    float magnitude = fabsf(x);
    int exponent = magnitude ? ilogbf(magnitude) : -6;
    if (exponent < -6) exponent = -6;
    int steps = (int)rintf(ldexpf(magnitude, 3 - exponent));  // of 2^(exponent - 3), 16 at most
    if (steps == 16) steps = 8, exponent++;
    return sign | (steps < 8 ? steps : (exponent + 7) << 3 | (steps - 8));
}
static unsigned quantize_four(unsigned low, unsigned high, float scale) {
    unsigned result = 0;
    unsigned short halves[4] = {
        (unsigned short)low, (unsigned short)(low >> 16), (unsigned short)high, (unsigned short)(high >> 16)};
    for (int i = 0; i < 4; i++) result |= nearest_byte(emulator::widen(halves[i]) * (1.0f / scale)) << 8 * i;
    return result;
}
#endif
static float power_of_two(float x) { return exp2f(x); }
static float log_of_two(float x) { return log2f(x); }
static float reciprocal(float x) { return 1.0f / x; }
template <class T> static T load_fresh(const T* p) { return *p; }
template <class T> static T load_relaxed(const T* p) { return *p; }
template <class T> static void store_relaxed(T* p, const T& value) { *p = value; }
static void add_release(int* counter, int value) { *counter += value; }
static int load_acquire(const int* p) { return *p; }
static void spin() { emulator::fail("thread %d waits for a block that has not run", threadIdx.x); }
static unsigned bits_of(float x) { return (unsigned)emulator::to_bits(x); }
static float float_of(unsigned bits) { return emulator::from_bits<float>(bits); }
static void prefetch(const char*) {}
static void wait_for_earlier_kernels() { emulator::waited_in[threadIdx.x] = blockIdx.x + 1; }
static void let_next_start() {}

// To be called before a run: `ranges` are begins and ends.
extern "C" void forbid(const void* ranges, int count) {
    emulator::forbidden = (const emulator::Range*)ranges, emulator::num_forbidden = count;
    memset(emulator::waited_in, 0, sizeof emulator::waited_in);
    memset(emulator::num_copies, 0, sizeof emulator::num_copies);
    emulator::num_early = 0;
}
extern "C" int num_early_copies() { return emulator::num_early; }
