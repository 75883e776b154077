// fused_accum._C_cuda: what makes executors that run the rows of fused_accum._C on a GPU. Imports where there is no
// driver. Python's own interface is enough for four functions, and to read pybind11's headers takes a while.
//
// Built with FA_CUDA_EMULATION, the same sources run on CPU tensors as if they were on a device: DEVICE_TYPE is "cpu",
// so that fused_accum/backends/cuda.py takes those, at Place(1, 0), under any device number and stream.
#include <Python.h>

#include "cuda_launch.h"
#include "executor.h"

namespace fa {
namespace {

// The keywords of Cuda(device, stream, ...), addresses and how much memory is there: see CudaExecutor.
const char* const kKeywords[] = {"device", "stream", "slots", "slot_count", "found_inf",    "clip",
                                 "counts", "scale",  "squares", "square_count", nullptr};

PyObject* cuda(PyObject*, PyObject* args, PyObject* keywords) {
  int device;
  unsigned long long stream, slots = 0, found_inf = 0, clip = 0, counts = 0, scale = 0, squares = 0;
  long long slot_count = 0, square_count = 0;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "iK|KLKKKKKL:Cuda", const_cast<char**>(kKeywords), &device, &stream,
                                   &slots, &slot_count, &found_inf, &clip, &counts, &scale, &squares, &square_count)) {
    return nullptr;
  }
  return executor_capsule(std::make_unique<CudaExecutor>(
      device, stream, CudaExecutor::Scratch{slots, slot_count, squares, square_count},
      CudaExecutor::Factors{found_inf, clip, counts, scale}));
}

PyObject* why_not(PyObject*, PyObject* args) {
  int device;
  if (!PyArg_ParseTuple(args, "i:why_not", &device)) return nullptr;
  return PyUnicode_FromString(why_no_cuda(device).c_str());
}

PyObject* squares_for(PyObject*, PyObject* args) {
  long long rows, elements;
  if (!PyArg_ParseTuple(args, "LL:squares_for", &rows, &elements)) return nullptr;
  return PyLong_FromLongLong(CudaExecutor::squares_for(rows, elements));
}

PyMethodDef methods[] = {
    {"Cuda", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cuda)), METH_VARARGS | METH_KEYWORDS,
     "An executor for a device and a stream."},
    {"why_not", why_not, METH_VARARGS, "\"\" where the kernels run on this device, else why not."},
    {"squares_for", squares_for, METH_VARARGS, "How many float64 the sums of squares of a call take."},
    {}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C_cuda", "CUDA kernels of fused_accum; knows no torch.", -1, methods,
                          nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace fa

#if defined(FA_CUDA_EMULATION)
constexpr const char* kDeviceType = "cpu";
#else
constexpr const char* kDeviceType = "cuda";
#endif

PyMODINIT_FUNC PyInit__C_cuda() {
  PyObject* const m = PyModule_Create(&fa::definition);
  if (m && (PyModule_AddStringConstant(m, "DEVICE_TYPE", kDeviceType) ||
            PyModule_AddIntConstant(m, "SLOT_BYTES", sizeof(fa::ScalarSlot)))) {
    Py_DECREF(m);
    return nullptr;
  }
  return m;
}
