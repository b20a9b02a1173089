//! How parameters get their memory and contents.

use std::sync::Arc;

use ridge_graph::passes::Layout;
use ridge_graph::{Bindings, Type};

use super::{Session, named};
use crate::backend::{Backend, Buffer, WeightData};
use crate::error::{Result, RuntimeError};
use crate::launches::component_offsets;
use crate::param::{Param, ParamKind, lock};

/// What a parameter is loaded from.
enum GivenWeight {
    /// Its parts, for every rank.
    Whole(Vec<WeightData>),
    /// The parts of each rank's share.
    Shares(Vec<Vec<WeightData>>),
}

impl Session {
    /// Brings a parameter to the device, in place of one of that name. If programs use that one, its memory is
    /// overwritten, after all steps submitted so far.
    ///
    /// # Errors
    /// When the bytes do not fit the type, memory runs out, or programs use a parameter of another type or one that they
    /// only read and that is therefore not writable.
    pub fn load(&mut self, name: &str, ty: &Type, parts: Vec<WeightData>) -> Result<()> {
        self.load_as(name, ty, GivenWeight::Whole(parts))
    }

    /// Brings a parameter that is cut over the ranks of the backend to them, each its share of type `ty`, by rank: see
    /// [`Backend::upload_shares`].
    ///
    /// # Errors
    /// As for [`load`](Self::load), when there are more or fewer shares than ranks, and where the parameter is loaded
    /// again into memory that programs use.
    pub fn load_shares(&mut self, name: &str, ty: &Type, shares: Vec<Vec<WeightData>>) -> Result<()> {
        self.load_as(name, ty, GivenWeight::Shares(shares))
    }

    fn load_as(&mut self, name: &str, ty: &Type, given: GivenWeight) -> Result<()> {
        if let Some(cache) = self.caches.get(name) {
            return Err(cache.error("is a cache, which is not loaded; write to its memory".into()));
        }
        let layout = self.store.layout(&self.model, name);
        if let Some(param) = self.store.get(&self.model, name) {
            if param.derivation.is_some() {
                return Err(param.error("is a derived copy; load its sources".into()));
            }
            let mut memory = param.memory();
            if let Some(buffer) = memory.as_ref().filter(|b| param.kind == ParamKind::State || b.owners() > 1) {
                match given {
                    GivenWeight::Whole(parts) => self.overwrite(&param, buffer, ty, &parts)?,
                    GivenWeight::Shares(_) => {
                        return Err(
                            param.error("is used by programs; drop them before loading its shards again".into())
                        );
                    }
                }
            } else if *ty == param.ty {
                *memory = Some(self.upload(name, ty, given, layout.as_ref())?);
            } else {
                // Its layout was settled for another type.
                lock(&self.store.layouts).entry(Arc::clone(&self.model)).or_default().remove(name);
                let buffer = self.upload(name, ty, given, None)?;
                self.add(Param::new(name, ty, ParamKind::Weight, buffer));
                return Ok(());
            }
            param.changed();
            self.store.moved();
            return Ok(());
        }
        let buffer = self.upload(name, ty, given, layout.as_ref())?;
        self.add(Param::new(name, ty, ParamKind::Weight, buffer));
        Ok(())
    }

    /// Has these weights, which have no memory yet, kept in memory of the host, where steps read them: those that the device has no
    /// room for. A weight is on the device while it is loaded.
    pub fn keep_on_host<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.store.keep_on_host(&self.model, name, ParamKind::Weight));
    }

    /// Has these states, which have no memory yet and are stored plainly, kept in memory of the host, where steps read and write
    /// them: those of optimisers that the device has no room for. They are loaded there, and never take memory of the device.
    pub fn keep_states_on_host<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        names.into_iter().for_each(|name| self.store.keep_on_host(&self.model, name, ParamKind::State));
    }

    /// Zeroed memory for a parameter, where it is kept.
    pub(super) fn allocate(&self, kind: &'static str, name: &str, bytes: usize) -> Result<Buffer> {
        let allocated = match self.store.on_host(&self.model, name) {
            Some(_) => self.backend.allocate_on_host(bytes),
            None => self.backend.allocate(bytes),
        };
        allocated.map_err(|e| named(kind, name, &e))
    }

    /// Uploads a weight in its settled layout to where it is kept, or a state as it is to memory of the host.
    fn upload(&self, name: &str, ty: &Type, given: GivenWeight, layout: Option<&Layout>) -> Result<Buffer> {
        if self.store.on_host(&self.model, name) == Some(ParamKind::State) {
            let GivenWeight::Whole(parts) = &given else {
                let why = "is a state in memory of the host, which has no shares of ranks; load it whole".into();
                return Err(RuntimeError::Argument { kind: "parameter", name: name.into(), why });
            };
            let buffer = self.allocate("state", name, component_offsets(ty, &Bindings::new())?.1)?;
            self.overwrite(&Param::new(name, ty, ParamKind::State, buffer.clone()), &buffer, ty, parts)?;
            return Ok(buffer);
        }
        let uploaded = match given {
            GivenWeight::Whole(parts) => self.backend.upload(ty, parts),
            GivenWeight::Shares(shares) => self.backend.upload_shares(ty, shares),
        };
        let buffer = self.kept(name, uploaded.map_err(|e| named("weight", name, &e))?)?;
        self.set_layout(name, ty, &buffer, layout)?;
        Ok(buffer)
    }

    /// A weight that is on the device, where it is to be kept.
    fn kept(&self, name: &str, on_device: Buffer) -> Result<Buffer> {
        if self.store.on_host(&self.model, name).is_none() {
            return Ok(on_device);
        }
        self.backend.moved_to_host(&on_device).map_err(|e| named("weight", name, &e))
    }

    pub(super) fn set_layout(&self, name: &str, ty: &Type, buffer: &Buffer, layout: Option<&Layout>) -> Result<()> {
        let Some(Layout::Named(layout)) = layout else { return Ok(()) };
        self.backend.set_layout(buffer, ty, layout).map_err(|e| named("weight", name, &e))
    }

    pub(super) fn add(&self, param: Param) {
        self.store.insert(&self.model, Arc::new(param));
    }

    fn overwrite(&self, param: &Param, buffer: &Buffer, ty: &Type, parts: &[WeightData]) -> Result<()> {
        if (Type { state: false, ..ty.clone() }) != param.ty {
            return Err(param.error(format!("is {} where programs use it, and cannot become {ty}", param.ty)));
        }
        if !self.backend.is_writable(buffer) {
            let why = "is used by programs that only read it, so it is not writable; allocate the states of the programs \
                       that update it before compiling, or drop the programs before loading it again";
            return Err(param.error(why.into()));
        }
        let (offsets, bytes) = component_offsets(ty, &Bindings::new())?;
        if let ([part], 1) = (parts, offsets.len())
            && part.bytes().len() == bytes
        {
            return self.backend.write(buffer, part.bytes());
        }
        let mut whole = vec![0; bytes];
        let mut ends = offsets.iter().skip(1).chain([&bytes]);
        for (offset, part) in offsets.iter().zip(parts) {
            let part = part.bytes();
            if offset + part.len() > *ends.next().unwrap_or(&bytes) {
                return Err(param.error(format!("{} bytes exceed the size of {ty}", part.len())));
            }
            whole[*offset..offset + part.len()].copy_from_slice(part);
        }
        if parts.len() != offsets.len() || (parts.len() == 1 && parts[0].bytes().len() != bytes) {
            let given: Vec<usize> = parts.iter().map(|p| p.bytes().len()).collect();
            return Err(param.error(format!("{ty} has {bytes} bytes, but {given:?} were given")));
        }
        self.backend.write(buffer, &whole)
    }

    /// Makes a weight of random numbers on the device, in place of one of that name; false where the device leaves that
    /// to the host. See [`Backend::random`].
    ///
    /// # Errors
    /// When memory runs out, programs or copies use a parameter of that name, or it is no weight of this type.
    pub fn load_random(&mut self, name: &str, ty: &Type, state: u64, scale: f64) -> Result<bool> {
        self.load_made(name, ty, |backend| backend.random(ty, state, scale))
    }

    /// Stores elements of the dtype of `ty` in the format of `ty`, in place of a weight of that name; false where the device
    /// leaves that to the host. See [`Backend::encode`].
    ///
    /// # Errors
    /// As for [`load_random`](Self::load_random).
    pub fn load_encoded(&mut self, name: &str, ty: &Type, plain: &WeightData) -> Result<bool> {
        self.load_made(name, ty, |backend| backend.encode(ty, plain))
    }

    /// Takes the weight that the backend makes, in place of one of that name; false where it makes none.
    fn load_made(
        &mut self,
        name: &str,
        ty: &Type,
        make: impl FnOnce(&dyn Backend) -> Result<Option<Buffer>>,
    ) -> Result<bool> {
        if self.store.on_host(&self.model, name) == Some(ParamKind::State) {
            return Ok(false);
        }
        let known = self.find(name);
        if let Some(param) = &known {
            if param.kind != ParamKind::Weight || param.ty != *ty {
                return Err(param.error(format!("is {}, not a weight of {ty}", param.ty)));
            }
            if param.memory().as_ref().is_some_and(|b| b.owners() > 1) {
                return Err(param.error("is used by programs; drop them before replacing it".into()));
            }
        }
        let Some(buffer) = make(&*self.backend).map_err(|e| named("weight", name, &e))? else {
            return Ok(false);
        };
        let buffer = self.kept(name, buffer)?;
        self.set_layout(name, ty, &buffer, self.store.layout(&self.model, name).as_ref())?;
        match known {
            Some(param) => {
                *param.memory() = Some(buffer);
                param.changed();
                self.store.moved();
            }
            None => self.add(Param::new(name, ty, ParamKind::Weight, buffer)),
        }
        Ok(true)
    }
}
