// What the CPU kernels offer to the bindings: plain pointers, sizes and strides, no torch types.
//
// Every kernel works on a range [begin, end) of independent items, so that the caller decides about threads. Kernels
// are compiled once per instruction set (csrc/cpu/*.cpp, see CMakeLists.txt); `active_kernels` returns the table of the
// best set that this processor has, or of the one chosen with `select_isa`. Strides are in elements unless a name
// ends in _bytes.
#pragma once

#include <cstdint>

namespace vllm_native {

enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

struct RmsNormArgs {
  DType dtype;
  const void* x;         // [rows, size]
  void* residual;        // null, or [rows, size] contiguous: x is added to it first, then it is what is normalised
  const void* weight;    // [size]
  void* out;             // [rows, size] contiguous
  int64_t x_stride;
  int64_t size;
  float eps;
};

struct SiluMulArgs {
  DType dtype;
  const void* gate_up;  // [rows, 2 * size] contiguous
  void* out;            // [rows, size] contiguous
  int64_t size;
  bool has_limit;
  float limit;
};

struct RotaryArgs {
  DType dtype;
  void* x;               // [tokens, heads, >= rotary_dim], changed in place
  const float* cos_sin;  // [tokens, rotary_dim]: cosines, then sines
  int64_t heads;
  int64_t token_stride;
  int64_t head_stride;
  int64_t rotary_dim;
  bool interleaved;
};

struct WriteKvArgs {
  int64_t item_size;     // bytes of an element
  char* pages;           // [blocks, heads, block_size, key_dim + value_dim]
  const char* key;       // [tokens, heads, key_dim]
  const char* value;     // [tokens, heads, value_dim]
  const int64_t* slots;  // [tokens]; below block_size: skip
  int64_t heads, block_size, key_dim, value_dim;
  int64_t block_stride_bytes, head_stride_bytes, row_stride_bytes;
  int64_t key_token_stride_bytes, key_head_stride_bytes;
  int64_t value_token_stride_bytes, value_head_stride_bytes;
};

struct CopyRowsArgs {
  char* target;
  const char* source;
  const int64_t* target_rows;  // [rows]; negative: skip
  const int64_t* source_rows;  // [rows], or null for 0, 1, 2, ...
  int64_t row_bytes;
  int64_t target_stride_bytes, source_stride_bytes;
};

struct DecodeAttentionArgs {
  DType dtype;
  const void* q;            // [rows, q_heads, key_dim]
  const void* pages;        // [blocks, kv_heads, block_size, key_dim + value_dim]
  void* out;                // [rows, q_heads, value_dim] contiguous
  const int32_t* table;     // [rows, table_stride]
  const int32_t* lengths;   // [rows]
  const int32_t* lows;      // [rows]: first position to read
  float* partial;           // scratch, see decode_partial_floats
  int64_t rows, q_heads, kv_heads, block_size, key_dim, value_dim;
  int64_t q_row_stride, q_head_stride, table_stride;
  int64_t block_stride, head_stride, token_stride;
  int64_t split;            // positions per part; a row is cut into parts that different threads may take
  int64_t parts_max;        // parts of the longest row
  float scale;
};

struct LinearArgs {
  DType x_dtype, weight_dtype;
  const void* weight;  // [outputs, inputs] contiguous
  const void* bias;    // null, or [outputs] of x_dtype
  const float* x;      // [rows, inputs] contiguous, already fp32
  void* out;           // [rows, outputs] contiguous, x_dtype
  int64_t rows, inputs, outputs;
};

struct DeltaStepArgs {
  const float* q;      // [requests, heads, key_dim]
  const float* k;
  const float* v;      // [requests, heads, value_dim]
  const float* g;      // [requests, heads, key_dim]
  const float* beta;   // [requests, heads]
  float* states;       // [blocks, heads, key_dim, value_dim]
  const int64_t* source;
  const int64_t* target;  // 0: compute, but write nothing
  float* out;          // [requests, heads, value_dim] contiguous
  int64_t heads, key_dim, value_dim;
  int64_t block_stride;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride;  // per request
};

struct MhcWeightsArgs {
  const float* mixed;  // [tokens, (2 + n) * n]
  const float* scale;  // [3]
  const float* base;   // [(2 + n) * n]
  float* pre;          // [tokens, n]
  float* post;         // [tokens, n]
  float* comb;         // [tokens, n, n]
  int64_t streams;
  int64_t iterations;
  float eps;
};

struct Kernels {
  const char* isa;
  void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);                     // rows
  void (*silu_and_mul)(const SiluMulArgs&, int64_t begin, int64_t end);                 // rows
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);                        // tokens
  void (*write_kv)(const WriteKvArgs&, int64_t begin, int64_t end);                     // tokens
  void (*copy_rows)(const CopyRowsArgs&, int64_t begin, int64_t end);                   // rows
  void (*decode_attention)(const DecodeAttentionArgs&, int64_t begin, int64_t end);     // rows * kv_heads * parts_max
  void (*merge_decode_parts)(const DecodeAttentionArgs&, int64_t begin, int64_t end);   // rows * q_heads
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);                        // groups of kLinearColumns
  void (*to_float)(DType, const void* in, float* out, int64_t count);
  void (*delta_step)(const DeltaStepArgs&, int64_t begin, int64_t end);                 // requests * heads
  void (*mhc_weights)(const MhcWeightsArgs&, int64_t begin, int64_t end);               // tokens
};

// Output columns that one item of `linear` computes.
constexpr int64_t kLinearColumns = 4;
// Largest number of residual streams of `mhc_weights`.
constexpr int64_t kMhcStreamsMax = 16;

// Floats of scratch that decode attention needs: one running maximum, one sum and one vector per part.
inline int64_t decode_partial_floats(int64_t rows, int64_t q_heads, int64_t parts_max, int64_t value_dim) {
  return rows * q_heads * parts_max * (value_dim + 2);
}

const Kernels& active_kernels();

// Chooses an instruction set by name ("scalar", "avx2", "avx512"; "auto" for the best); false if it is not available.
bool select_isa(const char* name);

}  // namespace vllm_native
