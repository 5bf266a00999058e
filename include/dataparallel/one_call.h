#pragma once

#include <ATen/core/Tensor.h>
#include <dataparallel/export.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace dataparallel::detail {

/// One call of a wrapper at a time: further ones wait, and one from inside
/// another is an error, since it would wait for itself. (Of calls made in the
/// workers of the call under way `WorkerTeam` tells.)
///
/// Thread safety: all of it.
class DATAPARALLEL_EXPORT OneCall {
 public:
  OneCall();
  ~OneCall();
  OneCall(const OneCall&) = delete;
  OneCall& operator=(const OneCall&) = delete;

  /// While it lives, this is the one call. `function` is for the error.
  class DATAPARALLEL_EXPORT Scope {
   public:
    Scope(OneCall& calls, const std::string& function);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    OneCall& calls_;
    std::unique_lock<std::mutex> lock_;
  };

  /// Backward from scalar `roots` as a part of the call under way: hooks that
  /// run in it are inside the call, in whatever thread of autograd's.
  void backward(const std::vector<at::Tensor>& roots);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace dataparallel::detail
