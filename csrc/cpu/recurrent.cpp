// One step of the gated delta rule, and the mixing weights of hyper-connections. All fp32.
#include "simd.h"

namespace vllm_native {
namespace VLLM_ISA {

// One head of one request: S <- diag(exp g) S; u = beta (v - k.S); S <- S + k x u; out = q.S.
static void delta_head(const DeltaStepArgs& a, int64_t request, int64_t head) {
  const int64_t dk = a.key_dim, dv = a.value_dim;
  const float* q = a.q + request * a.q_stride + head * dk;
  const float* k = a.k + request * a.k_stride + head * dk;
  const float* v = a.v + request * a.v_stride + head * dv;
  const float* g = a.g + request * a.g_stride + head * dk;
  const float beta = a.beta[request * a.beta_stride + head];
  const float* before = a.states + a.source[request] * a.block_stride + head * dk * dv;
  float* after = a.target[request] > 0 ? a.states + a.target[request] * a.block_stride + head * dk * dv : nullptr;
  float* out = a.out + (request * a.heads + head) * dv;
  // Columns of the state are independent of each other: take a few vectors of them through both passes.
  constexpr int64_t kColumns = 4;
  float decay[1024], key[1024], query[1024];
  for (int64_t i = 0; i < dk; ++i) {
    decay[i] = exp_one(g[i]);
    key[i] = k[i];
    query[i] = q[i];
  }
  const int64_t tile = kColumns * Vec::kLanes;
  int64_t c = 0;
  for (; c + tile <= dv; c += tile) {
    Vec seen[kColumns], read[kColumns];
    for (int j = 0; j < kColumns; ++j) seen[j] = read[j] = vec_set(0);
    for (int64_t i = 0; i < dk; ++i) {
      const Vec weight = vec_set(decay[i] * key[i]);
      for (int j = 0; j < kColumns; ++j) {
        seen[j] = vec_fma(vec_load(before + i * dv + c + j * Vec::kLanes), weight, seen[j]);
      }
    }
    for (int j = 0; j < kColumns; ++j) seen[j] = vec_set(beta) * (vec_load(v + c + j * Vec::kLanes) - seen[j]);
    for (int64_t i = 0; i < dk; ++i) {
      const Vec keep = vec_set(decay[i]), add = vec_set(key[i]), ask = vec_set(query[i]);
      for (int j = 0; j < kColumns; ++j) {
        const int64_t at = i * dv + c + j * Vec::kLanes;
        const Vec state = vec_fma(add, seen[j], vec_load(before + at) * keep);
        if (after != nullptr) vec_store(after + at, state);
        read[j] = vec_fma(ask, state, read[j]);
      }
    }
    for (int j = 0; j < kColumns; ++j) vec_store(out + c + j * Vec::kLanes, read[j]);
  }
  for (; c < dv; ++c) {
    float seen = 0, read = 0;
    for (int64_t i = 0; i < dk; ++i) seen += before[i * dv + c] * decay[i] * key[i];
    seen = beta * (v[c] - seen);
    for (int64_t i = 0; i < dk; ++i) {
      const float state = before[i * dv + c] * decay[i] + key[i] * seen;
      if (after != nullptr) after[i * dv + c] = state;
      read += query[i] * state;
    }
    out[c] = read;
  }
}

void delta_step(const DeltaStepArgs& a, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) delta_head(a, item / a.heads, item % a.heads);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exp_one(-x)); }

// Divides every column (or row) of an n x n matrix by its sum.
static void normalise(float* m, int64_t n, bool columns, float eps) {
  const int64_t along = columns ? n : 1, across = columns ? 1 : n;
  for (int64_t i = 0; i < n; ++i) {
    float sum = 0;
    for (int64_t j = 0; j < n; ++j) sum += m[i * across + j * along];
    const float divisor = sum + eps;
    for (int64_t j = 0; j < n; ++j) m[i * across + j * along] /= divisor;
  }
}

void mhc_weights(const MhcWeightsArgs& a, int64_t begin, int64_t end) {
  const int64_t n = a.streams;
  for (int64_t token = begin; token < end; ++token) {
    const float* mixed = a.mixed + token * (2 + n) * n;
    for (int64_t i = 0; i < n; ++i) {
      a.pre[token * n + i] = sigmoid(mixed[i] * a.scale[0] + a.base[i]) + a.eps;
      a.post[token * n + i] = 2.0f * sigmoid(mixed[n + i] * a.scale[1] + a.base[n + i]);
    }
    float* comb = a.comb + token * n * n;
    for (int64_t i = 0; i < n; ++i) {
      float top = -INFINITY, sum = 0;
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = 2 * n + i * n + j;
        comb[i * n + j] = mixed[at] * a.scale[2] + a.base[at];
        if (comb[i * n + j] > top) top = comb[i * n + j];
      }
      for (int64_t j = 0; j < n; ++j) sum += comb[i * n + j] = exp_one(comb[i * n + j] - top);
      for (int64_t j = 0; j < n; ++j) comb[i * n + j] = comb[i * n + j] / sum + a.eps;
    }
    normalise(comb, n, true, a.eps);
    for (int64_t i = 1; i < a.iterations; ++i) {
      normalise(comb, n, false, a.eps);
      normalise(comb, n, true, a.eps);
    }
  }
}

}  // namespace VLLM_ISA
}  // namespace vllm_native
