#include "layer/experts_tail_sm90.cuh"

namespace lamella {

int experts_tail_sm90(const LamellaExpertsTail& p, void* workspace, int64_t zeroed, void* stream) {
  switch (static_cast<Elem>(p.elem)) {
    case Elem::bf16:
      return experts_tail<bf16>(p, workspace, zeroed, stream);
    case Elem::f16:
      return experts_tail<f16>(p, workspace, zeroed, stream);
    default:
      return kUnsupported;
  }
}

}  // namespace lamella
