#include "gemm/gemm_sm90.h"

#include "gemm/gemm_sm90.cuh"

namespace lamella {
namespace {

template <class T, class O, int kTokens, bool kScaled>
int launch_gemm(const LamellaGemm& g, void* workspace, int64_t workspace_bytes, void* stream) {
  using Shape = GemmShape<T, kTokens, kScaled>;
  const int64_t rows = g.act != kActNone ? 2 * g.n : g.n;
  GemmPlan plan;
  plan.num_k = static_cast<int>((g.k * static_cast<int64_t>(sizeof(T)) + 127) / 128);
  plan.num_n = static_cast<int>((rows + kGemmRows - 1) / kGemmRows);
  plan.num_m = static_cast<int>((g.m + kTokens - 1) / kTokens);
  const int64_t num_units = int64_t{plan.num_k} * plan.num_n * plan.num_m;
  const int64_t num_sms = device_facts().num_sms;
  const int64_t blocks = num_units < num_sms ? num_units : num_sms;
  if (workspace_bytes < 1024 + num_sms * Shape::kSums * 256 * 4 || blocks > 256) return kUnsupported;
  plan.flags = static_cast<unsigned*>(workspace);
  plan.partials = reinterpret_cast<float*>(static_cast<char*>(workspace) + 1024);
  constexpr CUtensorMapDataType kType = sizeof(T) == 1               ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                        : std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  constexpr int kSize = sizeof(T);
  if (!map_rows(&plan.w, kType, kSize, g.w, rows, g.k, g.w_stride * kSize, kGemmRows) ||
      !map_rows(&plan.x, kType, kSize, g.x, g.m, g.k, g.x_stride * kSize, kTokens))
    return kUnsupported;
  const Launch how{dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kShared,
                   static_cast<cudaStream_t>(stream)};
  return launch(gemm_sm90_kernel<T, O, kTokens, kScaled>, how, plan, g);
}

template <class T, class O, bool kScaled>
int by_tokens(const LamellaGemm& g, void* workspace, int64_t bytes, void* stream) {
  if (g.m <= 8) return launch_gemm<T, O, 8, kScaled>(g, workspace, bytes, stream);
  if (g.m <= 16) return launch_gemm<T, O, 16, kScaled>(g, workspace, bytes, stream);
  if (g.m <= 32) return launch_gemm<T, O, 32, kScaled>(g, workspace, bytes, stream);
  if (g.m <= 64) return launch_gemm<T, O, 64, kScaled>(g, workspace, bytes, stream);
  // two sets of sums do not fit the registers for more than 128 tokens
  if constexpr (!kScaled) {
    if (g.m > 128) return launch_gemm<T, O, 256, kScaled>(g, workspace, bytes, stream);
  }
  return launch_gemm<T, O, 128, kScaled>(g, workspace, bytes, stream);
}

}  // namespace

int gemm_sm90(const LamellaGemm& g, void* workspace, int64_t bytes, void* stream) {
  const Elem in = static_cast<Elem>(g.elem), out = static_cast<Elem>(g.out_elem);
  if (in == Elem::bf16 && out == Elem::bf16) return by_tokens<bf16, bf16, false>(g, workspace, bytes, stream);
  if (in == Elem::f16 && out == Elem::f16) return by_tokens<f16, f16, false>(g, workspace, bytes, stream);
  if (in == Elem::f8e4m3 && out == Elem::bf16) return by_tokens<f8, bf16, true>(g, workspace, bytes, stream);
  return kUnsupported;
}

}  // namespace lamella
