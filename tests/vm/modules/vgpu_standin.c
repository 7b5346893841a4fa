// SPDX-License-Identifier: GPL-2.0-only
/*
 * A stand-in for NVIDIA's vendor VFIO driver (vGPU 17 and newer): takes any PCI function that driver_override gives it,
 * is a vfio driver without being vfio-pci, and has the attributes nvidia/current_vgpu_type and
 * nvidia/creatable_vgpu_types. The function itself is handed out as vfio-pci does; nothing of a vGPU is played.
 *
 * As of NVIDIA's driver: a type is set by its number and removed by 0, a number that it does not have is refused and
 * changes nothing, none is changed while somebody has the device open, and no change has a uevent.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/vfio_pci_core.h>

static bool names_first;
module_param(names_first, bool, 0644);
MODULE_PARM_DESC(names_first, "list types as `NAME NUMBER`, as NVIDIA's documents do, and not as `NUMBER : NAME`");

static const struct {
	unsigned int number;
	const char *name;
} types[] = {
	{ 1147, "NVIDIA L40S-1Q" },
	{ 1148, "NVIDIA L40S-2Q" },
};

struct standin {
	struct vfio_pci_core_device core;
	struct mutex lock;
	unsigned int type;
	bool is_open;
};

static struct standin *standin_of(struct device *dev)
{
	return container_of(dev_get_drvdata(dev), struct standin, core);
}

static ssize_t current_vgpu_type_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%u\n", standin_of(dev)->type);
}

static ssize_t current_vgpu_type_store(struct device *dev, struct device_attribute *attr, const char *buf, size_t count)
{
	struct standin *standin = standin_of(dev);
	unsigned int number, i;
	bool known;
	int error;

	error = kstrtouint(buf, 10, &number);
	if (error)
		return error;
	known = !number;
	for (i = 0; i < ARRAY_SIZE(types); i++)
		known |= types[i].number == number;
	if (!known)
		return -EINVAL;
	mutex_lock(&standin->lock);
	if (standin->is_open)
		error = -EBUSY;
	else
		standin->type = number;
	mutex_unlock(&standin->lock);
	return error ? error : count;
}
static DEVICE_ATTR_RW(current_vgpu_type);

/* Only the header of a function that has a type: it can have no other beside it. */
static ssize_t creatable_vgpu_types_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	ssize_t at = names_first ? 0 : sysfs_emit(buf, "ID    : vGPU Name\n");
	unsigned int i;

	if (standin_of(dev)->type)
		return at;
	for (i = 0; i < ARRAY_SIZE(types); i++)
		at += names_first ? sysfs_emit_at(buf, at, "%s %u\n", types[i].name, types[i].number) :
				    sysfs_emit_at(buf, at, "%-5u : %s\n", types[i].number, types[i].name);
	return at;
}
static DEVICE_ATTR_RO(creatable_vgpu_types);

static struct attribute *standin_attrs[] = {
	&dev_attr_current_vgpu_type.attr,
	&dev_attr_creatable_vgpu_types.attr,
	NULL,
};

static const struct attribute_group standin_group = {
	.name = "nvidia",
	.attrs = standin_attrs,
};

static const struct attribute_group *standin_groups[] = { &standin_group, NULL };

static int standin_open(struct vfio_device *vdev)
{
	struct standin *standin = container_of(vdev, struct standin, core.vdev);
	int error;

	mutex_lock(&standin->lock);
	error = standin->type ? vfio_pci_core_enable(&standin->core) : -ENODEV;
	standin->is_open = !error;
	mutex_unlock(&standin->lock);
	if (!error)
		vfio_pci_core_finish_enable(&standin->core);
	return error;
}

static void standin_close(struct vfio_device *vdev)
{
	struct standin *standin = container_of(vdev, struct standin, core.vdev);

	vfio_pci_core_close_device(vdev);
	mutex_lock(&standin->lock);
	standin->is_open = false;
	mutex_unlock(&standin->lock);
}

static const struct vfio_device_ops standin_ops = {
	.name = "vgpu-standin",
	.init = vfio_pci_core_init_dev,
	.release = vfio_pci_core_release_dev,
	.open_device = standin_open,
	.close_device = standin_close,
	.ioctl = vfio_pci_core_ioctl,
	.device_feature = vfio_pci_core_ioctl_feature,
	.read = vfio_pci_core_read,
	.write = vfio_pci_core_write,
	.mmap = vfio_pci_core_mmap,
	.request = vfio_pci_core_request,
	.match = vfio_pci_core_match,
};

static int standin_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct standin *standin;
	int error;

	standin = vfio_alloc_device(standin, core.vdev, &pdev->dev, &standin_ops);
	if (IS_ERR(standin))
		return PTR_ERR(standin);
	mutex_init(&standin->lock);
	dev_set_drvdata(&pdev->dev, &standin->core);
	error = vfio_pci_core_register_device(&standin->core);
	if (error)
		vfio_put_device(&standin->core.vdev);
	return error;
}

static void standin_remove(struct pci_dev *pdev)
{
	struct vfio_pci_core_device *core = dev_get_drvdata(&pdev->dev);

	vfio_pci_core_unregister_device(core);
	vfio_put_device(&core->vdev);
}

static struct pci_driver standin_driver = {
	.name = "nvidia",
	.id_table = (const struct pci_device_id[]){ { } },
	.probe = standin_probe,
	.remove = standin_remove,
	.dev_groups = standin_groups,
	.driver_managed_dma = true,
};
module_pci_driver(standin_driver);

MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Stand-in for NVIDIA's vendor VFIO driver, for tests");
