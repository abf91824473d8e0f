/* cuBLAS, cuDNN and the calls that launch kernels, without doing anything: a training step of PyTorch runs through, and
 * every allocation that PyTorch itself makes happens as on a device. What these libraries would ask for does not: cuDNN
 * says that its plans need no workspace. Sizes of the device (132 multiprocessors) are in stub_cuda.c. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define OK(name) int name(void) { return 0; }
#define MAKES(name) int name(void **made) { *made = calloc(1, 256); return 0; }

/* runtime and driver */
OK(cudaLaunchKernel) OK(cudaLaunchKernelExC) OK(cudaFuncSetAttribute) OK(cudaMemcpy) OK(cudaMemcpyAsync)
OK(cudaMemset) OK(cudaMemsetAsync) OK(cudaFreeHost) OK(cudaHostRegister) OK(cudaThreadExchangeStreamCaptureMode)
OK(cuCtxSetCurrent) OK(cuLaunchKernel) OK(cuLaunchKernelEx) OK(cuTensorMapEncodeTiled)
int cudaHostAlloc(void **p, size_t n, unsigned f) { *p = malloc(n); return 0; }
int cudaRuntimeGetVersion(int *v) { *v = 13020; return 0; }
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
int cudaDeviceGetAttribute(int *v, int attribute, int d) {
  *v = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 10 ? 32 : 1; /* 9.0, SMs, warp */
  return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t s) { *n = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned x) {
  *n = 2;
  return 0;
}
int cudaPointerGetAttributes(void *a, const void *p) {
  memset(a, 0, 32);
  *(int *)a = 2; /* cudaMemoryTypeDevice */
  return 0;
}
int cudaFuncGetAttributes(void *a, const void *f) {
  memset(a, 0, 200);
  ((int *)a)[6] = 1024; /* maxThreadsPerBlock */
  ((int *)a)[9] = 90; /* binaryVersion: attention kernels check it */
  return 0;
}
int cuCtxGetCurrent(void **c) { *c = (void *)1; return 0; }

/* cuBLAS and cublasLt */
MAKES(cublasCreate_v2) MAKES(cublasLtMatmulDescCreate) MAKES(cublasLtMatrixLayoutCreate)
MAKES(cublasLtMatmulPreferenceCreate)
OK(cublasDestroy_v2) OK(cublasSetStream_v2) OK(cublasSetWorkspace_v2) OK(cublasSetMathMode) OK(cublasSetPointerMode_v2)
OK(cublasSgemm_v2) OK(cublasGemmEx) OK(cublasSgemmStridedBatched) OK(cublasGemmStridedBatchedEx) OK(cublasSgemmEx)
OK(cublasLtMatmul) OK(cublasLtMatmulDescDestroy) OK(cublasLtMatmulDescSetAttribute) OK(cublasLtMatrixLayoutDestroy)
OK(cublasLtMatrixLayoutSetAttribute) OK(cublasLtMatmulPreferenceDestroy) OK(cublasLtMatmulPreferenceSetAttribute)
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
size_t cublasLtGetVersion(void) { return 130200; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int n, void *r, int *k) {
  memset(r, 0, 80);
  *k = 1;
  return 0;
}

/* cuDNN */
MAKES(cudnnCreate) MAKES(cudnnCreateTensorDescriptor) MAKES(cudnnCreateFilterDescriptor)
MAKES(cudnnCreateConvolutionDescriptor) MAKES(cudnnCreateActivationDescriptor)
OK(cudnnSetStream) OK(cudnnSetTensorNdDescriptor) OK(cudnnSetFilterNdDescriptor) OK(cudnnSetConvolutionNdDescriptor)
OK(cudnnDestroyTensorDescriptor) OK(cudnnDestroyFilterDescriptor) OK(cudnnDestroyConvolutionDescriptor)
OK(cudnnBatchNormalizationForwardTrainingEx) OK(cudnnBatchNormalizationForwardInference)
OK(cudnnBatchNormalizationBackwardEx)
OK(cudnnBackendDestroyDescriptor) OK(cudnnBackendFinalize) OK(cudnnBackendExecute) OK(cudnnBackendSetAttribute)
size_t cudnnGetVersion(void) { return 92600; }
size_t cudnnGetCudartVersion(void) { return 13020; }
const char *cudnnGetErrorString(int e) { return "stub"; }
void cudnnGetLastErrorString(char *m, size_t n) { m[0] = 0; }
int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *h, int m, int o, void *x, void *z, void *y, void *b, void *a, size_t *size) { *size = 0; return 0; }
int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void *h, int m, int o, void *x, void *y, void *dy, void *dz, void *dx, void *b, void *a, size_t *size) {
  *size = 0;
  return 0;
}
int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(void *h, int m, int o, void *a, void *x, size_t *size) {
  *size = 0;
  return 0;
}
int cudnnBackendCreateDescriptor(int type, void **made) { *made = calloc(1, 256); return 0; }
int cudnnBackendGetAttribute(void *d, int name, int type, int64_t asked, int64_t *count, void *values) {
  /* CUDNN_ATTR_ENGINEHEUR_RESULTS 202, ENGINECFG_ENGINE 300, EXECUTION_PLAN_WORKSPACE_SIZE 402: one each */
  if (name == 402 && values) *(int64_t *)values = 0;
  if (count) *count = name == 202 || name == 300 || name == 402;
  return 0;
}
