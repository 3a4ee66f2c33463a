// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "chunkstore/base/file.h"
#include "snapshotter/layer_finder.h"
#include "snapshotter/layer_mounts.h"

namespace lamina::snapshotter {
namespace {

std::vector<LazyLayer> Layers(size_t count) {
  std::vector<LazyLayer> layers(count);
  for (size_t i = 0; i < count; ++i) layers[i].layer.digest.bytes[0] = static_cast<uint8_t>(i);
  return layers;
}

// How many layers each group has, a minus for one with its marks.
std::vector<int> Sizes(const std::vector<LayerGroup>& groups) {
  std::vector<int> sizes;
  for (const LayerGroup& group : groups) {
    const int size = static_cast<int>(group.layers.size());
    sizes.push_back(group.keep_marks ? -size : size);
  }
  return sizes;
}

TEST(GroupLayers, EachLayerIsAMountThatOthersCanShare) {
  EXPECT_EQ(Sizes(GroupLayers({}, true)), std::vector<int>());
  EXPECT_EQ(Sizes(GroupLayers(Layers(3), true)), (std::vector<int>{1, -1, -1}));
  EXPECT_EQ(Sizes(GroupLayers(Layers(2), false)), (std::vector<int>{-1, -1}));
}

TEST(GroupLayers, ALongChainIsOneMount) {
  EXPECT_EQ(Sizes(GroupLayers(Layers(127), true)), (std::vector<int>{127}));
}

TEST(GroupLayers, DirectoriesThatSayNothingOfThemselvesAreMergedWithWhatIsBelow) {
  std::vector<LazyLayer> layers = Layers(4);
  layers[2].marks.implied_directories = true;
  const std::vector<LayerGroup> groups = GroupLayers(layers, true);
  EXPECT_EQ(Sizes(groups), (std::vector<int>{3, -1}));
  EXPECT_EQ(groups[0].layers[2].layer.digest, layers[2].layer.digest);
}

TEST(GroupLayers, LayersBelowAnOpaqueRootAreHiddenByMerging) {
  std::vector<LazyLayer> layers = Layers(4);
  layers[1].marks.opaque_root = true;
  EXPECT_EQ(Sizes(GroupLayers(layers, true)), (std::vector<int>{2, -1, -1}));
}

// Image specification, config.md, "Layer ChainID".
TEST(ChainId, IsTheDiffIdOfTheLowestAndADigestAboveIt) {
  const Digest first = Digest::Of(AsBytes("1"));
  const Digest second = Digest::Of(AsBytes("2"));
  EXPECT_EQ(ChainId({first, second}, 1), first.ToString());
  EXPECT_EQ(ChainId({first, second}, 2),
            Digest::Of(AsBytes(first.ToString() + " " + second.ToString())).ToString());
}

}  // namespace
}  // namespace lamina::snapshotter
