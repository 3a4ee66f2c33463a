// SPDX-License-Identifier: Apache-2.0
//
// The header Link (RFC 8288), as registries use it for lists in pages: `</v2/a/tags/list?last=x>;
// rel="next"` (distribution-spec, "Listing Tags" and "Listing Referrers").
#ifndef LAMINA_CHUNKSTORE_REGISTRY_LINK_H_
#define LAMINA_CHUNKSTORE_REGISTRY_LINK_H_

#include <string>
#include <string_view>

namespace lamina::registry {

// Where the first link of one header value with the relation "next" leads, as it is written there,
// which may be a relative reference. Empty if there is none.
std::string NextLink(std::string_view header);

}  // namespace lamina::registry

#endif  // LAMINA_CHUNKSTORE_REGISTRY_LINK_H_
