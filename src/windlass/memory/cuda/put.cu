// Kernels that store the pieces of a plan into a peer's memory, and compute digests of the pieces.
//
// A piece is a block of rows: `rows` runs of `row_elems` elements, `src_pitch` and `dst_pitch`
// bytes apart. `pos` is the position of its payload in the link's payload, and `pos_pitch` the
// payload bytes from one of its rows to the next. The digest depends on the position of every byte
// and on the lengths of rows, not on the grouping of rows into pieces. One block of threads works
// on one piece at a time.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct Piece {
    u64 src, dst, src_pitch, dst_pitch, pos, pos_pitch;
    u32 rows, row_elems;
};

struct Hash {
    u64 a, b;
};

// Must give the same digest as tests/support/position_digest.py, which explains the construction.
// That file adds products with a constant; here `settle` multiplies the sums by it, once.
constexpr u64 POSITION = 0x9E3779B97F4A7C15ull;

// `salt`: the unit's position times POSITION.
__device__ __forceinline__ void absorb_salted(Hash& h, u64 value, u64 salt) {
    u64 x = value ^ salt;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 29;
    h.a += x;
    x ^= x >> 31;
    h.b += x;
}

__device__ __forceinline__ void absorb(Hash& h, u64 value, u64 pos) {
    absorb_salted(h, value, pos * POSITION);
}

__device__ __forceinline__ void settle(Hash h, u64* out) {
    for (int step = 16; step; step >>= 1) {
        h.a += __shfl_down_sync(0xffffffffu, h.a, step);
        h.b += __shfl_down_sync(0xffffffffu, h.b, step);
    }
    if ((threadIdx.x & 31) == 0) {
        atomicAdd(out, h.a * 0xA0761D6478BD642Full);
        atomicAdd(out + 1, h.b * 0xE7037ED1A0B428DBull);
    }
}

__device__ __forceinline__ u64 join(u32 low, u32 high) { return (u64)low | ((u64)high << 32); }

// A unit of the digest is 8 bytes if the bytes of a row are a multiple of 8, else 4, 2 or 1.
__device__ __forceinline__ u32 unit_of(u32 row_nbytes) {
    return row_nbytes & 1 ? 1 : row_nbytes & 2 ? 2 : row_nbytes & 4 ? 4 : 8;
}

__device__ __forceinline__ u64 read_unit(const u8* p, u32 unit) {
    u64 value = 0;
    for (u32 i = 0; i < unit; i++) value |= (u64)p[i] << (8 * i);
    return value;
}

__device__ __forceinline__ void absorb16_salted(Hash& h, uint4 v, u64 salt) {
    absorb_salted(h, join(v.x, v.y), salt);
    absorb_salted(h, join(v.z, v.w), salt + 8 * POSITION);
}

__device__ __forceinline__ void absorb16(Hash& h, uint4 v, u64 pos) {
    absorb16_salted(h, v, pos * POSITION);
}

template <bool HASH>
__device__ void put_rows(const Piece& p, u32 row_nbytes, Hash& h) {
    u64 mix = p.src | p.dst | row_nbytes;
    if (p.rows > 1) mix |= p.src_pitch | p.dst_pitch;
    if ((mix & 15) == 0) {
        const u32 per_row = row_nbytes >> 4, total = per_row * p.rows, T = blockDim.x;
        for (u32 first = threadIdx.x; first < total; first += 8 * T) {
            uint4 v[8];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    v[k] = __ldcs((const uint4*)(p.src + row * p.src_pitch) + at);
                }
            }
#pragma unroll
            for (int k = 0; k < 8; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    __stcs((uint4*)(p.dst + row * p.dst_pitch) + at, v[k]);
                    if (HASH) absorb16(h, v[k], p.pos + row * p.pos_pitch + 16ull * at);
                }
            }
        }
        return;
    }
    const u32 unit = unit_of(row_nbytes), per_row = row_nbytes / unit, total = per_row * p.rows;
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const u8* s = (const u8*)(p.src + row * p.src_pitch) + at;
        u8* d = (u8*)(p.dst + row * p.dst_pitch) + at;
        for (u32 k = 0; k < unit; k++) d[k] = s[k];
        if (HASH) absorb(h, read_unit(s, unit), p.pos + row * p.pos_pitch + at);
    }
}

// Dtypes that can be cast into each other: CASTS in layout/dtypes.py.
enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

__device__ __forceinline__ constexpr u32 itemsize_of(Dtype dtype) { return dtype == FLOAT32 ? 4 : 2; }

template <Dtype FROM>
__device__ __forceinline__ float decode(u32 bits) {
    if (FROM == FLOAT32) return __uint_as_float(bits);
    if (FROM == BFLOAT16) return __uint_as_float(bits << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}

// Round to nearest even, as torch casts. A NaN becomes the NaN that c10 uses.
template <Dtype TO>
__device__ __forceinline__ u32 encode(float f) {
    const u32 bits = __float_as_uint(f);
    if (TO == FLOAT32) return bits;
    if (TO == BFLOAT16) {
        if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
        return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    }
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(f));
    return half;
}

// As `encode`; `lost` becomes true if a finite number became infinite.
template <Dtype FROM, Dtype TO>
__device__ __forceinline__ u32 cast(float f, bool& lost) {
    const u32 bits = encode<TO>(f);
    if (TO == FLOAT16 || (TO == BFLOAT16 && FROM == FLOAT32))
        lost |= (bits & 0x7fffu) == (TO == FLOAT16 ? 0x7c00u : 0x7f80u) && (__float_as_uint(f) & 0x7fffffffu) != 0x7f800000u;
    return bits;
}

// `out[2]`: 0, or 1 + the payload position of a piece with a cast that overflowed.
__device__ __forceinline__ void note(u64* out, bool lost, const Piece& p) {
    if (lost && out) atomicMax(out + 2, p.pos + 1);
}

template <Dtype FROM, Dtype TO, bool HASH>
__device__ void put_cast(const Piece& p, Hash& h, u64* out) {
    // Eight elements are one or two vectors of 16 bytes on each side.
    constexpr u32 SRC = itemsize_of(FROM) / 2, DST = itemsize_of(TO) / 2;
    const u32 row_nbytes = p.row_elems * itemsize_of(TO);
    bool lost = false;
    u64 mix = p.src | p.dst;
    if (p.rows > 1) mix |= p.src_pitch | p.dst_pitch;
    if ((mix & 15) == 0 && (p.row_elems & 7) == 0) {
        const u32 per_row = p.row_elems >> 3, total = per_row * p.rows, T = blockDim.x;
        for (u32 first = threadIdx.x; first < total; first += 4 * T) {
            uint4 v[4 * SRC];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    const uint4* s = (const uint4*)(p.src + row * p.src_pitch) + SRC * at;
#pragma unroll
                    for (int j = 0; j < SRC; j++) v[SRC * k + j] = __ldcs(s + j);
                }
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                u32 i = first + k * T;
                if (i < total) {
                    u32 row = p.rows == 1 ? 0 : i / per_row, at = i - row * per_row;
                    u32 made[8];
#pragma unroll
                    for (int e = 0; e < 8; e++) {
                        const uint4 from = v[SRC * k + e * SRC / 8];
                        const u32 at4 = FROM == FLOAT32 ? e & 3 : e >> 1;
                        const u32 word = at4 == 0 ? from.x : at4 == 1 ? from.y : at4 == 2 ? from.z : from.w;
                        const u32 bits = FROM == FLOAT32 ? word : e & 1 ? word >> 16 : word & 0xffffu;
                        made[e] = cast<FROM, TO>(decode<FROM>(bits), lost);
                    }
                    uint4* d = (uint4*)(p.dst + row * p.dst_pitch) + DST * at;
#pragma unroll
                    for (int j = 0; j < DST; j++) {
                        uint4 packed;
                        packed.x = TO == FLOAT32 ? made[4 * j] : made[0] | made[1] << 16;
                        packed.y = TO == FLOAT32 ? made[4 * j + 1] : made[2] | made[3] << 16;
                        packed.z = TO == FLOAT32 ? made[4 * j + 2] : made[4] | made[5] << 16;
                        packed.w = TO == FLOAT32 ? made[4 * j + 3] : made[6] | made[7] << 16;
                        __stcs(d + j, packed);
                        if (HASH) absorb16(h, packed, p.pos + row * p.pos_pitch + 16ull * (DST * at + j));
                    }
                }
            }
        }
        note(out, lost, p);
        return;
    }
    const u32 unit = unit_of(row_nbytes), per_row = row_nbytes / unit, total = per_row * p.rows;
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const u64 s = p.src + row * p.src_pitch, d = p.dst + row * p.dst_pitch;
        u64 value = 0;
        for (u32 k = 0; k < unit / itemsize_of(TO); k++) {
            const u32 e = at / itemsize_of(TO) + k;
            const u32 bits = FROM == FLOAT32 ? ((const u32*)s)[e] : ((const u16*)s)[e];
            const u32 made = cast<FROM, TO>(decode<FROM>(bits), lost);
            if (TO == FLOAT32)
                ((u32*)d)[e] = made;
            else
                ((u16*)d)[e] = (u16)made;
            value |= (u64)made << (8 * itemsize_of(TO) * k);
        }
        if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
    }
    note(out, lost, p);
}

#define PUT(NAME, BODY)                                                                        \
    extern "C" __global__ void __launch_bounds__(512) NAME(const Piece* pieces, u32 n, u64* out) { \
        Hash h = {0, 0};                                                                       \
        for (u32 i = blockIdx.x; i < n; i += gridDim.x) {                                      \
            Piece p = pieces[i];                                                               \
            BODY;                                                                              \
        }                                                                                      \
        if (out) settle(h, out);                                                               \
    }

PUT(put_1, (put_rows<false>(p, p.row_elems, h)))
PUT(put_2, (put_rows<false>(p, p.row_elems * 2, h)))
PUT(put_4, (put_rows<false>(p, p.row_elems * 4, h)))
PUT(put_8, (put_rows<false>(p, p.row_elems * 8, h)))
PUT(put_1_hashed, (put_rows<true>(p, p.row_elems, h)))
PUT(put_2_hashed, (put_rows<true>(p, p.row_elems * 2, h)))
PUT(put_4_hashed, (put_rows<true>(p, p.row_elems * 4, h)))
PUT(put_8_hashed, (put_rows<true>(p, p.row_elems * 8, h)))
#define PUT_CAST(NAME, FROM, TO)                                   \
    PUT(put_##NAME, (put_cast<FROM, TO, false>(p, h, out)))        \
    PUT(put_##NAME##_hashed, (put_cast<FROM, TO, true>(p, h, out)))

PUT_CAST(float32_bfloat16, FLOAT32, BFLOAT16)
PUT_CAST(float32_float16, FLOAT32, FLOAT16)
PUT_CAST(bfloat16_float32, BFLOAT16, FLOAT32)
PUT_CAST(bfloat16_float16, BFLOAT16, FLOAT16)
PUT_CAST(float16_float32, FLOAT16, FLOAT32)
PUT_CAST(float16_bfloat16, FLOAT16, BFLOAT16)

// Block float8 (128 x 128, e4m3, one float32 scale per block), as layout/quantization.py defines it.
// A piece is one block: rows `src_pitch` apart at the source, values or one scale at the destination.

// Weights are rounded to bfloat16 first.
template <Dtype FROM>
__device__ __forceinline__ float read_weight(const Piece& p, u32 row, u32 col, bool& lost) {
    const u64 at = p.src + row * p.src_pitch;
    const u32 bits = FROM == FLOAT32 ? ((const u32*)at)[col] : ((const u16*)at)[col];
    if (FROM == BFLOAT16) return decode<BFLOAT16>(bits);
    return decode<BFLOAT16>(cast<FROM, BFLOAT16>(decode<FROM>(bits), lost));
}

// Keeps a NaN, which fmaxf would ignore.
__device__ __forceinline__ float max_nan(float a, float b) {
    float found;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(found) : "f"(a), "f"(b));
    return found;
}

__device__ __forceinline__ float block_max(float mine) {
    __shared__ float partial[32];
    for (int step = 16; step; step >>= 1) mine = max_nan(mine, __shfl_xor_sync(0xffffffffu, mine, step));
    __syncthreads();
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = mine;
    __syncthreads();
    mine = threadIdx.x < (blockDim.x >> 5) ? partial[threadIdx.x & 31] : 0.0f;
    if (threadIdx.x < 32) {
        for (int step = 16; step; step >>= 1)
            mine = max_nan(mine, __shfl_xor_sync(0xffffffffu, mine, step));
        if (threadIdx.x == 0) partial[0] = mine;
    }
    __syncthreads();
    return partial[0];
}

// Multiply by the reciprocal, as torch does on a GPU. A division would round differently.
__device__ __forceinline__ float scale_of(float amax) { return max_nan(amax, 1e-4f) * (1.0f / 448.0f); }

__device__ __forceinline__ u32 to_e4m3(float f) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(f));
    return pair & 0xffu;
}

template <Dtype FROM, bool SCALES, bool HASH>
__device__ void put_fp8(const Piece& p, Hash& h, u64* out) {
    // Each thread keeps its part of the block in registers, so the block is read once.
    const u32 unit = unit_of(p.row_elems), per_row = p.row_elems / unit, total = per_row * p.rows;
    float held[4][8];
    float amax = 0.0f;
    bool lost = false;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 i = threadIdx.x + k * blockDim.x, row = i / per_row, at = (i - row * per_row) * unit;
        if (unit == 8 && i < total) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                held[k][j] = read_weight<FROM>(p, row, at + j, lost);
                amax = max_nan(amax, fabsf(held[k][j]));
            }
        }
    }
    if (unit != 8)
        for (u32 i = threadIdx.x; i < p.rows * p.row_elems; i += blockDim.x)
            amax = max_nan(amax, fabsf(read_weight<FROM>(p, i / p.row_elems, i % p.row_elems, lost)));
    note(out, lost, p);
    const float scale = scale_of(block_max(amax));
    if (SCALES) {
        if (threadIdx.x == 0) {
            *(float*)p.dst = scale;
            if (HASH) absorb(h, __float_as_uint(scale), p.pos);
        }
        return;
    }
    const float factor = 1.0f / scale;
    if (unit == 8) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            u32 i = threadIdx.x + k * blockDim.x, row = i / per_row, at = (i - row * per_row) * 8;
            if (i >= total) continue;
            u64 value = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) value |= (u64)to_e4m3(held[k][j] * factor) << (8 * j);
            u64 target = p.dst + row * p.dst_pitch + at;
            if (((p.dst | p.dst_pitch) & 7) == 0)
                *(u64*)target = value;
            else
                for (int j = 0; j < 8; j++) ((u8*)target)[j] = (u8)(value >> (8 * j));
            if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
        }
        return;
    }
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        u64 value = 0;
        for (u32 j = 0; j < unit; j++) {
            u32 bits = to_e4m3(read_weight<FROM>(p, row, at + j, lost) * factor);
            ((u8*)(p.dst + row * p.dst_pitch))[at + j] = (u8)bits;
            value |= (u64)bits << (8 * j);
        }
        if (HASH) absorb(h, value, p.pos + row * p.pos_pitch + at);
    }
}

#define PUT_FP8(NAME, FROM)                                                     \
    PUT(fp8_values_##NAME, (put_fp8<FROM, false, false>(p, h, out)))            \
    PUT(fp8_scales_##NAME, (put_fp8<FROM, true, false>(p, h, out)))             \
    PUT(fp8_values_##NAME##_hashed, (put_fp8<FROM, false, true>(p, h, out)))    \
    PUT(fp8_scales_##NAME##_hashed, (put_fp8<FROM, true, true>(p, h, out)))

PUT_FP8(bfloat16, BFLOAT16)
PUT_FP8(float32, FLOAT32)
PUT_FP8(float16, FLOAT16)

// Hashes bytes at the destination of a piece in place: `num` consecutive vectors of 16 bytes. Each
// thread has four loads in flight.
__device__ __forceinline__ void hash_run(const uint4* run, u32 num, u64 pos, Hash& h) {
    const u32 T = blockDim.x;
    const u64 stride = 16ull * T * POSITION;
    u64 salt = (pos + 16ull * threadIdx.x) * POSITION;
    for (u32 first = threadIdx.x; first < num; first += 4 * T) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (first + k * T < num) v[k] = __ldcs(run + first + k * T);
#pragma unroll
        for (int k = 0; k < 4; k++, salt += stride)
            if (first + k * T < num) absorb16_salted(h, v[k], salt);
    }
}

// Not inlined, so that its registers do not add to those of `hash_run`.
__device__ __noinline__ Hash hash_strided(const Piece* piece, u32 row_nbytes) {
    const Piece p = *piece;
    Hash h = {0, 0};
    const bool vectors = ((p.dst | row_nbytes | p.dst_pitch) & 15) == 0;
    const u32 unit = vectors ? 16 : unit_of(row_nbytes);
    const u32 per_row = row_nbytes / unit, total = per_row * p.rows;
#pragma unroll 4
    for (u32 i = threadIdx.x; i < total; i += blockDim.x) {
        u32 row = i / per_row, at = (i - row * per_row) * unit;
        const u8* source = (const u8*)(p.dst + row * p.dst_pitch) + at;
        const u64 pos = p.pos + row * p.pos_pitch + at;
        if (vectors)
            absorb16(h, __ldcs((const uint4*)source), pos);
        else
            absorb(h, read_unit(source, unit), pos);
    }
    return h;
}

template <int ITEMSIZE>
__device__ __forceinline__ void hash_rows(const Piece* piece, Hash& h) {
    const u64 start = piece->dst;
    const u32 rows = piece->rows, row_nbytes = piece->row_elems * ITEMSIZE;
    const bool dense = rows == 1 || (piece->dst_pitch == row_nbytes && piece->pos_pitch == row_nbytes);
    if (dense && ((start | row_nbytes) & 15) == 0) {
        hash_run((const uint4*)start, (row_nbytes >> 4) * rows, piece->pos, h);
        return;
    }
    const Hash part = hash_strided(piece, row_nbytes);
    h.a += part.a;
    h.b += part.b;
}

// Two blocks of 512 threads per multiprocessor: a single block waits for memory half of the time.
#define HASH(NAME, ITEMSIZE)                                                                      \
    extern "C" __global__ void __launch_bounds__(512, 2) NAME(const Piece* pieces, u32 n, u64* out) { \
        Hash h = {0, 0};                                                                          \
        for (u32 i = blockIdx.x; i < n; i += gridDim.x) hash_rows<ITEMSIZE>(pieces + i, h);        \
        settle(h, out);                                                                           \
    }

HASH(hash_1, 1)
HASH(hash_2, 2)
HASH(hash_4, 4)
HASH(hash_8, 8)
