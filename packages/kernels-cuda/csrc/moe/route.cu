#include "moe/route.h"

#include "moe/route.cuh"

LAMELLA_API int lamella_moe_route(int32_t* ids, float* weights, const void* logits, const float* bias,
                                  int64_t num_tokens, int64_t num_experts, int64_t logits_stride, int top_k,
                                  int scoring, int renormalize, int num_groups, int topk_groups, float scale, int elem,
                                  void* stream) {
  using namespace lamella;
  if (num_tokens == 0 || top_k == 0) return kOk;
  if (num_experts < 1 || num_experts > 1024 || top_k > 32 || top_k > num_experts || num_groups < 1 || num_groups > 32 ||
      num_experts % num_groups != 0 || num_tokens > INT32_MAX)
    return kUnsupported;
  const RouteParams p{ids,           weights,    logits,   bias,       num_tokens,
                      logits_stride, static_cast<int>(num_experts), top_k,    scoring,    num_groups,
                      topk_groups,   elem,       renormalize != 0,  scale};
  const Launch how{dim3(static_cast<unsigned>((num_tokens + kRouteWarps - 1) / kRouteWarps)), dim3(kRouteWarps * 32), 0,
                   static_cast<cudaStream_t>(stream)};
  if (num_experts <= 64) return launch(moe_route_kernel<2>, how, p);
  if (num_experts <= 128) return launch(moe_route_kernel<4>, how, p);
  if (num_experts <= 256) return launch(moe_route_kernel<8>, how, p);
  if (num_experts <= 512) return launch(moe_route_kernel<16>, how, p);
  return launch(moe_route_kernel<32>, how, p);
}
