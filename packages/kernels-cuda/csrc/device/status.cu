#include "device/status.h"

#include <cuda_runtime.h>

LAMELLA_API const char* lamella_cuda_status_text(int status) {
  switch (status) {
    case kOk:
      return "no error";
    case kUnsupported:
      return "no kernel serves this shape, type or option";
    case kNoKernelImage:
    case cudaErrorNoKernelImageForDevice:
      return "this build has no code for the device; build with its architecture in LAMELLA_CUDA_ARCHS";
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
      return "no CUDA device or no driver that is new enough (CUDA 13 needs 580 or later)";
    default:
      return cudaGetErrorString(static_cast<cudaError_t>(status));
  }
}

LAMELLA_API int lamella_cuda_device_count(void) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

LAMELLA_API int lamella_cuda_capability(int device) {
  int major = 0, minor = 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return major * 10 + minor;
}

LAMELLA_API int lamella_cuda_swap_device(int device) {
  int before = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess && before != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return -static_cast<int>(error);
  }
  return before;
}
