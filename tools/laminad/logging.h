// SPDX-License-Identifier: Apache-2.0
#ifndef LAMINA_TOOLS_LAMINAD_LOGGING_H_
#define LAMINA_TOOLS_LAMINAD_LOGGING_H_

#include "tools/laminad/config.h"

namespace lamina::daemon {

// Has everything logged to standard error as the configuration says.
void SetUpLogging(const Config& config);

}  // namespace lamina::daemon

#endif  // LAMINA_TOOLS_LAMINAD_LOGGING_H_
