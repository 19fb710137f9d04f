// y = x Wᵀ + b for few rows of x and weights that are read once: fp32 arithmetic over fp32, bf16 or fp16 weights.
//
// An item is a group of kLinearColumns output columns; their weights pass through the registers once for every few
// rows of x.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

// Sums of ROWS x COLUMNS dot products over `inputs` channels.
template <int ROWS, int COLUMNS, typename W>
static void dot_block(const W* weight, const float* x, int64_t inputs, float (*out)[COLUMNS]) {
  Vec sums[ROWS][COLUMNS];
  for (int m = 0; m < ROWS; ++m) {
    for (int n = 0; n < COLUMNS; ++n) sums[m][n] = vec_set(0);
  }
  const int64_t whole = inputs - inputs % Vec::kLanes;
  for (int64_t k = 0; k < whole; k += Vec::kLanes) {
    Vec w[COLUMNS];
    for (int n = 0; n < COLUMNS; ++n) {
      w[n] = vec_load(weight + n * inputs + k);
      // Rows are short and the hardware's prefetcher starts anew on each: ask for the next group of columns early.
      __builtin_prefetch(weight + (n + COLUMNS) * inputs + k);
    }
    for (int m = 0; m < ROWS; ++m) {
      const Vec value = vec_load(x + m * inputs + k);
      for (int n = 0; n < COLUMNS; ++n) sums[m][n] = vec_fma(value, w[n], sums[m][n]);
    }
  }
  const int64_t rest = inputs - whole;
  if (rest) {
    for (int n = 0; n < COLUMNS; ++n) {
      const Vec w = vec_load_part(weight + n * inputs + whole, rest);
      for (int m = 0; m < ROWS; ++m) {
        sums[m][n] = vec_fma(vec_load_part(x + m * inputs + whole, rest), w, sums[m][n]);
      }
    }
  }
  for (int m = 0; m < ROWS; ++m) {
    if constexpr (COLUMNS == 4) {
      vec_sum4(sums[m][0], sums[m][1], sums[m][2], sums[m][3], out[m]);
    } else {
      for (int n = 0; n < COLUMNS; ++n) out[m][n] = vec_sum(sums[m][n]);
    }
  }
}

template <int ROWS, int COLUMNS, typename W, typename T>
static void linear_block(const LinearArgs& a, int64_t row, int64_t column) {
  float sums[ROWS][COLUMNS];
  const W* weight = static_cast<const W*>(a.weight) + column * a.inputs;
  dot_block<ROWS, COLUMNS>(weight, a.x + row * a.inputs, a.inputs, sums);
  const T* bias = static_cast<const T*>(a.bias);
  for (int m = 0; m < ROWS; ++m) {
    T* out = static_cast<T*>(a.out) + (row + m) * a.outputs + column;
    for (int n = 0; n < COLUMNS; ++n) {
      from_float(bias != nullptr ? sums[m][n] + to_float(bias[column + n]) : sums[m][n], out + n);
    }
  }
}

// Rows of x per pass: with four columns the sums fill 24 of the 32 vector registers that AVX512 has.
#if defined(__AVX512F__)
constexpr int kRows = 6;
#else
constexpr int kRows = 3;
#endif

// Takes the last `rows` rows, fewer than a full pass.
template <int ROWS, int COLUMNS, typename W, typename T>
static void linear_rest(const LinearArgs& a, int64_t rows, int64_t column) {
  if constexpr (ROWS > 0) {
    if (rows == ROWS) {
      linear_block<ROWS, COLUMNS, W, T>(a, a.rows - rows, column);
    } else {
      linear_rest<ROWS - 1, COLUMNS, W, T>(a, rows, column);
    }
  }
}

template <int COLUMNS, typename W, typename T>
static void linear_columns(const LinearArgs& a, int64_t column) {
  int64_t row = 0;
  for (; row + kRows <= a.rows; row += kRows) linear_block<kRows, COLUMNS, W, T>(a, row, column);
  linear_rest<kRows - 1, COLUMNS, W, T>(a, a.rows - row, column);
}

void linear(const LinearArgs& a, int64_t begin, int64_t end) {
  with_type(a.weight_dtype, [&](auto weight_type) {
    with_type(a.x_dtype, [&](auto type) {
      using W = decltype(weight_type);
      using T = decltype(type);
      for (int64_t item = begin; item < end; ++item) {
        int64_t column = item * kLinearColumns;
        if (column + kLinearColumns <= a.outputs) {
          linear_columns<int(kLinearColumns), W, T>(a, column);
        } else {
          for (; column < a.outputs; ++column) linear_columns<1, W, T>(a, column);
        }
      }
    });
  });
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
