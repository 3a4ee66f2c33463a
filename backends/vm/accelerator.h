// SPDX-License-Identifier: Apache-2.0
//
// What runs the processors of virtual machines here.
#ifndef LAMINA_BACKENDS_VM_ACCELERATOR_H_
#define LAMINA_BACKENDS_VM_ACCELERATOR_H_

#include <string>

namespace lamina::backends {

struct Accelerator {
  std::string name;    // "kvm" or "tcg"
  std::string reason;  // why not kvm
};
// KVM counts as usable only if the processor has the extensions for it and the kernel makes a machine:
// /dev/kvm may open where neither holds.
Accelerator FindAccelerator();

}  // namespace lamina::backends

#endif  // LAMINA_BACKENDS_VM_ACCELERATOR_H_
