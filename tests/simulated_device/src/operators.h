// Operators: the CPU's, computed in the device's memory when their stream comes to them.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace simulated {

using at::IntArrayRef;  // by these names, torch's macro lists operators for autocast
using at::IValue;
using at::Scalar;
using at::ScalarType;
using at::Tensor;
using torch::jit::Stack;

// Operators that had to wait for their arguments, because the sizes of their results depend on values; and how often.
inline std::map<std::string, int64_t> waiting_operators;

// Dispatches as at top level, but without autograd, autocast and modes.
struct Plainly {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
};

inline bool is_on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// Returns a tensor of the CPU's in the same memory, for tasks.
inline Tensor as_cpu(const Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  auto* memory = tensor.numel() ? tensor.mutable_data_ptr() : nullptr;
  const auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto cpu = at::from_blob(memory, tensor.sizes(), tensor.strides(), options);
  cpu._set_conj(tensor.is_conj());
  cpu._set_neg(tensor.is_neg());
  return cpu;
}

// Kernels of a GPU are given the value of a CPU's scalar when they are queued.
inline Tensor as_argument(const Tensor& tensor) {
  if (!tensor.defined() || is_on_device(tensor)) return as_cpu(tensor);
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

inline Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

inline Tensor empty_on_device(const Tensor& tensor) {
  const auto options = tensor.options().device(c10::Device(kSim, current_device));
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

// Applies a function to the tensors of a value, and replaces this device by another.
template <class Function>
IValue mapped(const IValue& value, c10::Device device, Function function) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(function(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional(function(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kSim) return device;
  return value;
}

inline std::vector<Tensor> tensors_of(const IValue& value) {
  std::vector<Tensor> found;
  mapped(value, at::kCPU, [&](const Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  });
  return found;
}

// What a task keeps of a call: none of the arguments, whose memory is freed in the order of the streams.
struct Kernel {
  c10::OperatorHandle op;
  std::vector<int> aliases;  // for each result, the argument that it is; -1 if it is new
  c10::intrusive_ptr<Generator> generator;
  bool is_random = false;
  bool is_view = false;  // its results share the memory of their arguments

  void compute(Stack& stack) const {
    Plainly plainly;
    const auto call = [&] { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack); };
    is_random ? generator->lend(call) : call();
  }
};

// Copies what was computed into the memory that was made for it.
inline void store(const Kernel& kernel, const IValue& computed, const IValue& memory) {
  const auto from = tensors_of(computed), to = tensors_of(memory);
  for (size_t i = 0; i < std::min(from.size(), to.size()); i++) {
    if (from[i].numel() == 0) continue;  // or not asked for, by an output mask for example
    TORCH_CHECK(from[i].sizes() == to[i].sizes(), kernel.op.schema().name(), " was to return ", to[i].sizes(),
                ", and returned ", from[i].sizes());
    to[i].copy_(from[i]);
  }
}

// A call of an operator with arguments on the device.
struct Call : Kernel {
  std::vector<IValue> arguments;

  Call(c10::OperatorHandle of, Stack& stack) : Kernel{std::move(of)} {
    const auto& schema = op.schema();
    arguments = torch::jit::pop(stack, schema.arguments().size());
    for (const auto& argument : arguments) {
      for (const auto& tensor : tensors_of(argument))
        if (is_on_device(tensor)) current_device = tensor.device().index();
      if (argument.isDevice() && argument.toDevice().type() == kSim) current_device = index_of(argument.toDevice());
    }
    is_random = op.hasTag(at::Tag::nondeterministic_seeded);
    generator = as_generator(default_generator(current_device));
    for (auto& argument : arguments)
      if (argument.isGenerator() && argument.toGenerator().defined()) {
        generator = as_generator(argument.toGenerator());
        argument = IValue();  // the default one: the CPU's, to which the state is lent
      }
    for (const auto& result : schema.returns()) aliases.push_back(alias_of(result));
  }

  // Returns results of the right sizes, without their values; nothing if the sizes depend on values.
  std::optional<std::vector<IValue>> make_results() const {
    const auto& schema = op.schema();
    std::vector<size_t> unsized;
    for (size_t i = 0; i < arguments.size(); i++)
      if (schema.arguments()[i].is_out())
        for (const auto& tensor : tensors_of(arguments[i]))
          if (tensor.numel() == 0) unsized.push_back(i);
    std::vector<IValue> meta;
    if (is_view || !unsized.empty() || std::count(aliases.begin(), aliases.end(), -1)) {
      Stack stack;
      for (const auto& argument : arguments) stack.push_back(mapped(argument, at::kMeta, as_meta));
      const auto inputs = stack;
      try {
        Plainly plainly;
        op.callBoxed(&stack);
      } catch (const std::exception&) {
        return std::nullopt;  // computed at once; if the arguments are wrong, the CPU's kernel says so
      }
      meta = std::move(stack);
      for (auto i : unsized) {
        if (!arguments[i].isTensor()) return std::nullopt;
        at::native::resize_(arguments[i].toTensor(), inputs[i].toTensor().sizes(), std::nullopt);
      }
    }
    std::vector<IValue> results;
    for (size_t i = 0; is_view && i < aliases.size(); i++) {
      const auto base = arguments[aliases[i]].toTensor();
      results.push_back(mapped(meta[i], base.device(), [&](const Tensor& view) {
        TORCH_CHECK_NOT_IMPLEMENTED(view.scalar_type() == base.scalar_type(), "the simulated device lacks ", op.schema());
        return base.as_strided(view.sizes(), view.strides(), base.storage_offset() + view.storage_offset());
      }));
    }
    for (size_t i = 0; !is_view && i < aliases.size(); i++) {
      if (aliases[i] < 0 && !meta[i].isTensor() && !meta[i].isTensorList()) return std::nullopt;
      results.push_back(
          aliases[i] < 0 ? mapped(meta[i], {kSim, current_device}, empty_on_device) : arguments[aliases[i]]);
    }
    return results;
  }

  // Queues the computation of results that have been made.
  void enqueue(const std::vector<IValue>& results) const {
    auto inputs = on_cpu(as_argument);
    std::vector<std::pair<IValue, IValue>> outs;  // what is computed, and where it belongs
    for (size_t i = 0; i < arguments.size(); i++)
      if (op.schema().arguments()[i].is_out()) outs.emplace_back(inputs[i], mapped(arguments[i], at::kCPU, as_cpu));
    std::vector<IValue> made;
    for (size_t i = 0; i < results.size(); i++)
      made.push_back(aliases[i] < 0 ? mapped(results[i], at::kCPU, as_cpu) : IValue());
    streams().enqueue(current_stream(current_device), {[kernel = Kernel(*this), inputs, outs, made] {
                        Access access;
                        Plainly plainly;
                        Stack stack(inputs);
                        kernel.compute(stack);
                        for (const auto& [computed, memory] : outs) store(kernel, computed, memory);
                        for (size_t i = 0; i < made.size(); i++) store(kernel, stack[i], made[i]);
                      },
                      std::nullopt, nullptr, true});
  }

  // Waits for the arguments, computes the results, and returns them.
  std::vector<IValue> compute_now() const {
    const auto& schema = op.schema();
    waiting_operators[schema.name()]++;
    wait_for_current(current_device);
    auto stack = on_cpu(as_cpu);
    const auto inputs = stack;
    Access access;
    compute(stack);
    const auto onto_device = [](const Tensor& tensor, Tensor to) {
      Plainly plainly;
      as_cpu(to).copy_(tensor);
      return to;
    };
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!schema.arguments()[i].is_out()) continue;
      const auto from = tensors_of(inputs[i]), to = tensors_of(arguments[i]);
      for (size_t k = 0; k < to.size(); k++) {
        at::native::resize_(to[k], from[k].sizes(), std::nullopt);
        wait_for_current(current_device);
        onto_device(from[k], to[k]);
      }
    }
    std::vector<IValue> results;
    for (size_t i = 0; i < aliases.size(); i++)
      results.push_back(aliases[i] >= 0 ? arguments[aliases[i]]
                                        : mapped(stack[i], {kSim, current_device}, [&](const Tensor& tensor) {
                                            return onto_device(tensor, empty_on_device(tensor));
                                          }));
    return results;
  }

 private:
  // Returns arguments for the CPU's kernel. An `out` is one of its own: kernels may resize it.
  template <class Function>
  Stack on_cpu(Function function) const {
    Stack stack;
    for (size_t i = 0; i < arguments.size(); i++)
      stack.push_back(mapped(arguments[i], at::kCPU, [&](const Tensor& tensor) {
        const bool is_out = op.schema().arguments()[i].is_out();
        return is_out ? at::empty({0}, tensor.options().device(at::kCPU)) : function(tensor);
      }));
    return stack;
  }

  static c10::intrusive_ptr<Generator> as_generator(const at::Generator& generator) {
    TORCH_CHECK(generator.device().type() == kSim, "expected a generator on sim, but got one on ", generator.device());
    return c10::static_intrusive_pointer_cast<Generator>(generator.getIntrusivePtr());
  }

  int alias_of(const c10::Argument& result) {
    const auto* info = result.alias_info();
    if (!info) return -1;
    if (!info->isWrite()) is_view = true;
    const auto& all = op.schema().arguments();
    for (size_t i = 0; i < all.size(); i++)
      if (all[i].alias_info() && all[i].alias_info()->beforeSets() == info->beforeSets()) return static_cast<int>(i);
    TORCH_CHECK_NOT_IMPLEMENTED(false, "the simulated device can't tell what ", op.schema().name(), " returns");
  }
};

inline void call(const c10::OperatorHandle& op, Stack* stack) {
  c10::DeviceGuard guard(c10::Device(kSim, current_device));  // the call may be for another device
  const Call call(op, *stack);
  auto results = call.make_results();
  if (!results)
    results = call.compute_now();
  else if (!call.is_view)
    call.enqueue(*results);
  for (auto& result : *results) stack->push_back(std::move(result));
}

inline c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

inline void convolution(const c10::OperatorHandle&, Stack* stack) { call(operator_named("aten::convolution"), stack); }

// From the arguments (gradient, input, weight, ...) to (gradient, input, weight, sizes of the bias, ...).
inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  const auto weight = stack->at(stack->size() - 8).toTensor();
  const bool is_transposed = stack->at(stack->size() - 4).toBool();
  const auto groups = stack->at(stack->size() - 2).toInt();
  const std::vector<int64_t> bias{is_transposed ? weight.size(1) * groups : weight.size(0)};
  stack->insert(stack->end() - 7, IValue(bias));
  call(operator_named("aten::convolution_backward"), stack);
}

// As CUDA's: only pinned memory of the host is read or written later.
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  c10::DeviceGuard guard(is_on_device(to) ? to.device() : self.device());
  const auto stream = current_stream(current_device);
  const auto& host = is_on_device(self) ? to : self;
  const bool is_later = non_blocking && pinned_memory().contains(host.const_data_ptr());
  const bool leaves = !is_on_device(to), enters = !is_on_device(self);
  const Tensor source = enters && !is_later ? self.clone() : as_cpu(self);
  const Tensor target = as_cpu(to);
  const bool is_between = !enters && !leaves && self.device() != to.device();
  std::optional<Point> after;
  if (is_between) after = streams().end_of(current_stream(self.device().index()));
  const auto copied = streams().enqueue(stream, {[source, target] {
                                                   Access access;
                                                   Plainly plainly;
                                                   target.copy_(source);
                                                 },
                                                 after, nullptr, true});
  if (is_between) streams().enqueue(current_stream(self.device().index()), {nullptr, copied});
  const bool converts = self.scalar_type() != to.scalar_type();
  if ((leaves && (!is_later || converts)) || (enters && !non_blocking)) streams().wait_for(copied);
  return to;
}

inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return to.copy_(self);
}

inline at::Scalar local_scalar_dense(const Tensor& self) {
  wait_for_current(self.device().index());
  Access access;
  return as_cpu(self).item();
}

inline Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory(), keys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory(), keys, c10::dtype_or_default(dtype));
}

inline Tensor view(const Tensor& self, at::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline Tensor reshape_alias(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

inline const Tensor& resize(const Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

inline void record_stream(Tensor& self, c10::Stream stream) {
  device_memory().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", at::cpu::as_strided_symint);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("resize_", resize);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset", [](Tensor& self, at::Storage storage, at::SymInt offset,
                                                        at::SymIntArrayRef size, at::SymIntArrayRef stride) -> Tensor& {
    return at::cpu::set__symint(self, std::move(storage), offset, size, stride);
  });
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("record_stream", record_stream);
  library.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  library.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FP32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PROMOTED)
}

}  // namespace simulated
